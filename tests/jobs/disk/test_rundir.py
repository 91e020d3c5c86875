"""Test run directories: files that a job placed there are never followed, waited for or believed."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jobs.disk import rundir
from jobs.disk.rundir import UnsafePath


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "run" / "job" / "logs").mkdir(parents=True)
    (tmp_path / "run" / "job" / "logs" / "0.0.log").write_text("hello\n")
    (tmp_path / "secret").write_text("not for jobs")
    return tmp_path / "run"


def test_reads_a_plain_file(root: Path) -> None:
    assert rundir.read_under(root, "job/logs/0.0.log") == b"hello\n"
    assert rundir.names_under(root, "job/logs") == ["0.0.log"]
    assert rundir.names_under(root, "job/absent") == []


@pytest.mark.parametrize("path", ["../secret", "job/../../secret", "/etc/passwd", "job/./x", "job/logs/\0"])
def test_paths_that_lead_out(root: Path, path: str) -> None:
    with pytest.raises(UnsafePath, match="leads out"):
        rundir.open_under(root, path)


PLANTS: dict[str, Callable[[Path], object]] = {
    "a link to a file outside": lambda path: path.symlink_to(path.parents[3] / "secret"),
    "a link to a file inside": lambda path: path.symlink_to(path.parent / "0.0.log"),
    "a link that leads nowhere": lambda path: path.symlink_to("nowhere"),
    "a FIFO": os.mkfifo,
    "a link to a device": lambda path: path.symlink_to("/dev/zero"),
    "a folder": os.mkdir,
}


@pytest.mark.parametrize("plant", PLANTS.values(), ids=PLANTS.keys())
def test_what_is_planted_is_refused_at_once(root: Path, plant: Callable[[Path], object]) -> None:
    plant(root / "job" / "logs" / "1.0.log")
    with pytest.raises(UnsafePath):
        rundir.read_under(root, "job/logs/1.0.log")
    assert rundir.read_json_under(root, "job/logs/1.0.log") is None


def test_a_folder_that_is_a_link_is_not_entered(root: Path) -> None:
    (root / "job" / "attempt-1").symlink_to(root / "job" / "logs")
    with pytest.raises(UnsafePath, match="is not a folder"):
        rundir.open_under(root, "job/attempt-1/0.0.log")
    assert rundir.names_under(root, "job/attempt-1") == []


def test_a_folder_that_the_job_keeps_to_itself_has_no_names(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise its attempt could not be closed nor its logs be shown. Root is refused nothing: simulate it."""
    really_open = os.open

    def closed(path: Any, flags: int, *args: Any, **options: Any) -> int:
        if path == "logs":
            raise PermissionError(13, "Permission denied")
        return really_open(path, flags, *args, **options)

    monkeypatch.setattr(rundir.os, "open", closed)
    assert rundir.names_under(root, "job/logs") == []
    assert rundir.names_under(root, "job") == ["logs"]


def test_a_huge_sparse_file_is_not_read(root: Path) -> None:
    with open(root / "job" / "big.json", "wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(UnsafePath, match="larger than"):
        rundir.read_under(root, "job/big.json", limit=4096)


@pytest.mark.parametrize("text", ["", "[1]", "{", '{"a":' * 100_000, "\udcff"])
def test_json_that_is_none(root: Path, text: str) -> None:
    (root / "job" / "x.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    assert rundir.read_json_under(root, "job/x.json") is None


def test_made_exclusively_without_world_access(tmp_path: Path, settings: Any) -> None:
    settings.VIGIL_RUNS = tmp_path / "runs"
    before = os.umask(0o077)
    try:
        created = {rundir.make("default", 7) for _ in range(3)}
    finally:
        os.umask(before)
    assert len(created) == 3
    for directory in created:
        root = rundir.path_of(directory)
        modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (root, root / "portal", root / "job")}
        assert list(modes.values()) == [0o2700, 0o2750, 0o2770]


@pytest.mark.parametrize("directory", ["", "x", "../x", "default/..", "a/b/c", "/etc"])
def test_a_row_that_leads_out(directory: str) -> None:
    with pytest.raises(UnsafePath):
        rundir.path_of(directory)


def test_a_file_of_ours_is_replaced_whole(runs: Path) -> None:
    target = runs / "token"
    rundir.write(target, "one", mode=0o600)
    rundir.write(target, "two", mode=0o600)
    assert target.read_text() == "two"
    assert stat.S_IMODE(target.stat().st_mode) == 0o600
    assert [path.name for path in runs.iterdir()] == ["token"]
