"""Test committed and verified checkpoints, recognised from the folder alone, whatever it contains."""

from __future__ import annotations

import errno
import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from training import manifest
from training.__main__ import main
from training.attempt.lineage import newest_on_lineage
from training.manifest import CheckpointError, CheckpointFile, Manifest, UnreadableManifest

CONTENT = b"some tensors" * 1000


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return _make(tmp_path / "step-40", step=40)


def _make(folder: Path, **facts: Any) -> Path:
    folder.mkdir()
    (folder / "__0_0.distcp").write_bytes(CONTENT)
    (folder / ".metadata").write_bytes(b"about")
    files = tuple(
        CheckpointFile(name, len(content), hashlib.sha256(content).hexdigest())
        for name, content in (("__0_0.distcp", CONTENT), (".metadata", b"about"))
    )
    about: dict[str, Any] = {
        "step": 1, "generation": 2, "parent": (20, 1), "ancestors": ((10, 1), (20, 1)), "consumed_samples": 1280,
        "world_size": 2, "layout": {"axes": {"dp": 2}}, "config_hash": "abc", "files": files, "created": 1.5,
    }  # fmt: skip
    (folder / "COMMITTED").write_text(Manifest(**{**about, **facts}).dump())
    return folder


def test_a_manifest_comes_back_as_it_was(folder: Path) -> None:
    found = manifest.verify(folder)
    assert (found.name, found.step, found.generation, found.parent) == ("step-40", 40, 2, (20, 1))
    assert found.ancestors == ((10, 1), (20, 1))
    assert found.bytes == len(CONTENT) + 5
    assert manifest.check(folder) == manifest.read(folder) == found


def test_a_careful_caller_passes_a_descriptor(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        assert manifest.verify(descriptor).step == 40
    finally:
        os.close(descriptor)


def _shard(folder: Path) -> Path:
    return folder / "__0_0.distcp"


def _change(folder: Path, **changes: Any) -> None:
    path = folder / "COMMITTED"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def _link(path: Path) -> None:
    path.rename(path.with_name("x"))
    path.symlink_to("x")


def _pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def _sparse(path: Path) -> None:
    with open(path, "wb") as file:
        file.truncate(2**40)


NOT_COMMITTED: dict[str, tuple[Callable[[Path], object], str]] = {
    "no manifest": (lambda f: (f / "COMMITTED").unlink(), "never finished"),
    "half a manifest": (lambda f: (f / "COMMITTED").write_text('{"version": 1, "st'), "damaged"),
    "another version": (lambda f: _change(f, version=9), "version 9"),
    "a list": (lambda f: (f / "COMMITTED").write_text("[]"), "damaged"),
    "deep nesting": (lambda f: (f / "COMMITTED").write_text("[" * 100_000), "damaged"),
    "a negative step": (lambda f: _change(f, step=-1), "whole number"),
    "a file elsewhere": (lambda f: _change(f, files=[{"file": "../x", "bytes": 1, "sha256": "0"}]), "not a file of a"),
    "a file twice": (lambda f: _change(f, files=2 * [asdict(manifest.read(f).files[0])]), "listed twice"),
    "a manifest that is a link": (lambda f: _link(f / "COMMITTED"), "COMMITTED can't be read"),
    "a manifest that is a pipe": (lambda f: _pipe(f / "COMMITTED"), "not a plain file"),
    "a manifest without end": (lambda f: _sparse(f / "COMMITTED"), "far too large"),
    "a file gone": (lambda f: _shard(f).unlink(), "__0_0.distcp can't be read"),
    "half a file": (lambda f: _shard(f).write_bytes(CONTENT[:100]), "100 bytes, the manifest says 12000"),
    "a file that is a link": (lambda f: _link(_shard(f)), "can't be read"),
    "a file that is a pipe": (lambda f: _pipe(_shard(f)), "manifest says"),
    "a sparse file": (lambda f: _sparse(_shard(f)), "manifest says"),
    "a device": (lambda f: (_shard(f).unlink(), _shard(f).symlink_to("/dev/zero")), "can't be read"),
    "known to be damaged": (lambda f: (f / "DAMAGED").touch(), "found damaged"),
}  # fmt: skip


@pytest.mark.parametrize(("spoil", "message"), NOT_COMMITTED.values(), ids=NOT_COMMITTED)
def test_not_committed(folder: Path, spoil: Callable[[Path], object], message: str) -> None:
    spoil(folder)
    with pytest.raises(CheckpointError, match=message):
        manifest.check(folder)
    assert manifest.committed(folder.parent) == []


@pytest.fixture
def errors(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names that a file system fails to find, each once."""
    left: list[str] = []
    real = os.stat

    def stat(path: Any, **options: Any) -> os.stat_result:
        if path in left:
            left.remove(path)
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return real(path, **options)

    monkeypatch.setattr(os, "stat", stat)
    return left


def test_a_read_that_fails_for_the_moment_is_retried(tmp_path: Path, errors: list[str]) -> None:
    """Resuming from an older checkpoint would lose work."""
    checkpoints = tmp_path / "checkpoints"
    checkpoints.mkdir()
    _make(checkpoints / "step-40", step=40)
    errors += ["DAMAGED", "DAMAGED"]
    assert newest_on_lineage(tmp_path) == "step-40"
    assert not errors
    errors += ["DAMAGED", "DAMAGED"]
    with pytest.raises(UnreadableManifest, match="DAMAGED can't be read: Stale file handle"):
        manifest.check(checkpoints / "step-40")
    assert manifest.committed(checkpoints) == []


def test_verifying_a_marked_checkpoint_explains_why_and_what_to_do(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify", str(folder)]) == 0
    (folder / "DAMAGED").write_text("__0_0.distcp is not what was written.\n")
    assert main(["verify", str(folder)]) == 1
    output = capsys.readouterr().err
    assert "found damaged: __0_0.distcp is not what was written. No run resumes from it" in output
    assert "delete its file DAMAGED" in output
    (folder / "DAMAGED").write_text("\x1b]0;mine\x07")
    assert main(["verify", str(folder)]) == 1
    assert r"found damaged: \x1b]0;mine\x07. No run" in capsys.readouterr().err
    (folder / "DAMAGED").unlink()
    os.mkfifo(folder / "DAMAGED")
    assert main(["verify", str(folder)]) == 1
    assert "found damaged: DAMAGED is not a regular file" in capsys.readouterr().err


def test_committed_but_not_verified(folder: Path) -> None:
    _shard(folder).write_bytes(b"S" + CONTENT[1:])
    manifest.check(folder)
    with pytest.raises(CheckpointError, match="__0_0.distcp is not what was written"):
        manifest.verify(folder)


def test_no_more_is_read_than_allowed(folder: Path) -> None:
    with pytest.raises(CheckpointError, match="more than the 100 that are read"):
        manifest.verify(folder, max_bytes=100)


def test_only_a_folder_named_like_a_checkpoint_is_one(tmp_path: Path) -> None:
    for step, name in (
        (3, "step-3"),
        (3, "step-3.g1"),
        (20, "step-20"),
        (4, ".step-4.1"),
        (5, ".pruned-step-5.ab"),
        (6, "x"),
    ):
        _make(tmp_path / name, step=step, generation=1 if name.endswith("g1") else 2)
    (tmp_path / "step-7").symlink_to(tmp_path / "step-3")
    assert [found.name for found in manifest.committed(tmp_path)] == ["step-3.g1", "step-3", "step-20"]
    assert [(path.name, generation) for path, generation in manifest.staged(tmp_path)] == [(".step-4.1", 1)]
    assert manifest.committed(tmp_path / "none") == []
