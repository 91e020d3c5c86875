"""Test that a confined run reads only below its roots, wherever links point."""

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from training import run_file
from training.corpus import preparing
from training.corpus.errors import DataError
from training.corpus.preparing import CorpusOptions
from training.runtime import data_roots
from training.weights.weight_files import Weights, open_weights


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Path]:
    """Return a folder to read from, next to one that contains secrets."""
    root, secret = tmp_path / "data", tmp_path / "secret"
    for folder in (root, secret):
        folder.mkdir()
        (folder / "a.txt").write_text("\n".join(f"to be or not to be, {n} times" for n in range(2000)))
        (folder / "tokenizer.json").write_text("{}")
    data_roots.confine([str(root)], trusted=[tmp_path / "cache"])
    yield root
    data_roots._roots, data_roots._trusted = None, ()


def prepared(tmp_path: Path, source: Path, tokenizer: str = "auto") -> None:
    preparing.prepare(tmp_path / "cache", CorpusOptions(source=str(source), tokenizer=tokenizer))


def test_files_below_a_root_are_read(root: Path, tmp_path: Path) -> None:
    prepared(tmp_path, root)
    (root / "in").symlink_to(root / "a.txt")
    with data_roots.open_file(root / "in") as file:
        assert file.read(5) == b"to be"


def test_what_lies_elsewhere_is_not(root: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="VIGIL_DATA_ROOTS names them"):
        prepared(tmp_path, tmp_path / "secret")
    with pytest.raises(DataError, match="leads out"):
        prepared(tmp_path, root, str(tmp_path / "secret" / "tokenizer.json"))
    with pytest.raises(DataError, match="leads out"):
        open_weights(tmp_path / "secret")


@pytest.mark.parametrize("link", ["a file", "a folder"])
def test_a_link_in_a_root_does_not_lead_out(root: Path, tmp_path: Path, link: str) -> None:
    secret = tmp_path / "secret"
    (root / "b.txt").symlink_to(secret / "a.txt") if link == "a file" else (root / "b").symlink_to(secret)
    with pytest.raises(DataError, match="leads out"):
        prepared(tmp_path, root)


def test_a_link_that_is_swapped_after_the_check_does_not_either(root: Path, tmp_path: Path) -> None:
    """The opened file is judged, not its name: a rename between a check and the opening changes nothing."""
    (root / "now").symlink_to(root / "a.txt")
    data_roots.check_folder(root)
    (root / "now").unlink()
    (root / "now").symlink_to(tmp_path / "secret" / "a.txt")
    with pytest.raises(data_roots.OutsideRoots):
        data_roots.open_file(root / "now")


def test_shards_and_weights_behind_links_are_not_read(root: Path, tmp_path: Path) -> None:
    (tmp_path / "secret" / "index.json").write_text(json.dumps({"format": "vigil-tokens", "version": 1}))
    (root / "index.json").symlink_to(tmp_path / "secret" / "index.json")
    with pytest.raises(DataError, match="leads out"):
        prepared(tmp_path, root)
    (root / "model.safetensors").symlink_to(tmp_path / "secret" / "a.txt")
    with pytest.raises(DataError, match="leads out"):
        open_weights(root / "model.safetensors")


@pytest.mark.parametrize("there", [True, False], ids=["a file", "nothing"])
def test_nothing_is_revealed_of_a_file_outside_that_a_link_points_to(root: Path, tmp_path: Path, there: bool) -> None:
    """Not its size, and not whether it is there."""
    target = tmp_path / "secret" / ("a.txt" if there else "b.txt")
    prepared(tmp_path, root)
    shutil.copytree(next((tmp_path / "cache").iterdir()), root / "made")
    for name in ("train-00000.bin", "index.json"):
        (root / "made" / name).unlink()
        (root / "made" / name).symlink_to(target)
        with pytest.raises(DataError, match=rf"{name} can't be read \(it leads out") as report:
            prepared(tmp_path, root / "made")
        assert "bytes" not in str(report.value)
    (root / "texts").mkdir()
    (root / "texts" / "a.txt").symlink_to(target)
    with pytest.raises(DataError, match="a.txt can't be read: it leads out"):
        prepared(tmp_path, root / "texts")
    with pytest.raises(DataError, match="leads out"):
        prepared(tmp_path, root / "texts" / "a.txt")
    with pytest.raises(DataError, match="leads out"):
        open_weights(root / "texts" / "a.txt")
    (root / "weights").mkdir()
    (root / "weights" / "tokenizer.json").symlink_to(target)
    assert Weights(root / "weights", {}).files == [root / "weights" / "tokenizer.json"]


def test_tokens_of_other_folders_are_not_reused(root: Path, tmp_path: Path) -> None:
    """The cache is all jobs': a folder with the names, sizes and times of another must not be given its tokens."""
    created = []
    for number in range(2):
        folder = root / str(number) / "texts"
        folder.mkdir(parents=True)
        (folder / "a.txt").write_text("\n".join(f"{number} is what they say, {n:04d} times" for n in range(2000)))
        os.utime(folder / "a.txt", ns=(1, 1))
        created.append(preparing.prepare(tmp_path / "cache", CorpusOptions(source=str(folder))).path)
    assert created[0] != created[1]


def test_run_toml_names_the_roots(tmp_path: Path) -> None:
    for text, found in (('["/data"]', ("/data",)), ("[]", ()), ('"/"', ())):
        (tmp_path / "run.toml").write_text(f"[launch]\ndata_roots = {text}\n[run]\n")
        assert run_file.load(tmp_path / "run.toml").data_roots == found
    (tmp_path / "run.toml").write_text("[run]\n")
    assert run_file.load(tmp_path / "run.toml").data_roots is None
