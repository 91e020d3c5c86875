"""Test `python -m training export`: one plain file of the weights, which the real safetensors library reads."""

from __future__ import annotations

import errno
import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.training.checkpoint.saved import save
from training.__main__ import main

STATE = {
    "model": {
        "tokens": torch.arange(12, dtype=torch.float32).reshape(4, 3),
        "half": torch.linspace(-1, 1, 5, dtype=torch.bfloat16),
        "count": torch.tensor(7),
        "mask": torch.tensor([[True, False]]),
        "none": torch.empty((0, 4)),
        "transposed": torch.arange(6, dtype=torch.float64).reshape(2, 3).t(),
    },
    "optimizer": {"steps": torch.tensor(3.0), "means": {"tokens": torch.ones(4, 3)}},
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A committed checkpoint of STATE."""
    folder = tmp_path_factory.mktemp("export")
    options = {"recipe": "language", "language": {"layers": 4}, "steps": 100}
    return save(folder, STATE, step=40, consumed_samples=1280, config_hash="abc", config=options)


@pytest.fixture
def checkpoint(whole: Path, tmp_path: Path) -> Path:
    """Return a copy that a test may damage."""
    return Path(shutil.copytree(whole, tmp_path / "step-40"))


def test_the_file_conforms_to_the_format(whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "model.safetensors"
    assert main(["export", str(whole), str(target)]) == 0
    assert "6 tensors" in capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir()] == [target.name]
    header, data = _parse(target)
    about = header.pop("__metadata__")
    assert (about["step"], about["recipe"], about["config_hash"]) == ("40", "language", "abc")
    assert json.loads(about["options"]) == {"layers": 4}
    assert set(header) == set(STATE["model"])
    offsets = sorted(entry["data_offsets"] for entry in header.values())
    assert [low for low, _ in offsets] == [0, *(high for _, high in offsets[:-1])], "no holes"
    assert offsets[-1][1] == len(data)
    for name, expected in STATE["model"].items():
        entry = header[name]
        low, high = entry["data_offsets"]
        assert low % expected.itemsize == 0, f"{name} can be mapped"
        assert entry["shape"] == list(expected.shape)
        assert data[low:high] == expected.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def test_the_real_library_reads_it(whole: Path, tmp_path: Path) -> None:
    reader: Any = pytest.importorskip("safetensors")
    from safetensors.torch import load_file

    target = tmp_path / "model.safetensors"
    assert main(["export", str(whole), str(target)]) == 0
    found = load_file(target)
    assert set(found) == set(STATE["model"])
    for name, expected in STATE["model"].items():
        assert found[name].dtype == expected.dtype
        assert torch.equal(found[name], expected)
    with reader.safe_open(target, framework="pt") as opened:
        assert opened.metadata()["consumed_samples"] == "1280"


class Malice:
    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (Path("owned"),)


def _shard(checkpoint: Path) -> Path:
    return checkpoint / "__0_0.distcp"


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def _resigned(checkpoint: Path, content: bytes) -> None:
    """A table of contents that somebody else made, with the right digest."""
    import hashlib

    (checkpoint / ".metadata").write_bytes(content)
    path = checkpoint / "COMMITTED"
    payload = json.loads(path.read_text())
    for entry in payload["files"]:
        if entry["file"] == ".metadata":
            entry |= {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    path.write_text(json.dumps(payload))


SPOILT: dict[str, tuple[Callable[[Path], object], str]] = {
    "a bit flipped": (lambda c: _flip(_shard(c)), "__0_0.distcp is not what was written"),
    "half a file": (lambda c: _shard(c).write_bytes(b"x"), "1 bytes, the manifest says"),
    "never finished": (lambda c: (c / "COMMITTED").unlink(), "never finished"),
    "code in the table of contents": (lambda c: _resigned(c, pickle.dumps(Malice())), "which is not allowed there"),
    "another table of contents": (lambda c: _resigned(c, pickle.dumps([1, 2])), "not a valid table of contents"),
    "no table of contents": (lambda c: _resigned(c, b""), "not a valid table of contents"),
}


@pytest.mark.parametrize(("spoil", "message"), SPOILT.values(), ids=SPOILT)
def test_what_is_damaged_is_refused_by_name(
    checkpoint: Path,
    tmp_path: Path,
    spoil: Callable[[Path], object],
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    spoil(checkpoint)
    assert main(["export", str(checkpoint), str(tmp_path / "out")]) == 1
    output = capsys.readouterr().err
    assert message in output
    assert "step-40" in output
    assert [path.name for path in tmp_path.iterdir()] == ["step-40"], "nothing half made, and nothing run"


def test_a_file_system_without_links_will_do(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def knows_none(*_: object, **__: object) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "link", knows_none)
    assert main(["export", str(whole), str(tmp_path / "out")]) == 0, capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert main(["export", str(whole), str(tmp_path / "out")]) == 1


def test_what_is_there_is_left_alone(whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "out"
    target.write_text("mine")
    assert main(["export", str(whole), str(target)]) == 1
    assert "exists" in capsys.readouterr().err
    assert target.read_text() == "mine"
    assert main(["export", str(whole), str(tmp_path / "none" / "out")]) == 1
    assert "No such file" in capsys.readouterr().err


def _parse(path: Path) -> tuple[dict[str, Any], bytes]:
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    assert length % 8 == 0
    return json.loads(content[8 : 8 + length]), content[8 + length :]
