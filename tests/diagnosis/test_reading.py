"""Test logs that are empty, endless, or malicious."""

from __future__ import annotations

import gzip
import io
import itertools
import os
from pathlib import Path

import pytest

from diagnosis import offline
from diagnosis.logs import files
from diagnosis.logs.files import BLOCK, Log, Unreadable, open_log, read_blocks
from diagnosis.scanner import scan
from diagnosis.signatures.catalogue import Catalogue
from diagnosis.signatures.entry import parse_entry
from diagnosis.signatures.prefilter import Prefilter

BOOM = parse_entry({"name": "boom", "role": "root", "cause": "storage.io", "source": "here", "pattern": r"boom \d+"})
CATALOGUE = Catalogue([BOOM])


def read(path: Path, *, is_cut: bool = False) -> tuple[list[tuple[int, str]], list[str]]:
    with open_log(path) as log:
        return found_in(*read_blocks(log, is_cut=is_cut)), log.limits


def found_in(*parts: bytes) -> list[tuple[int, str]]:
    scanned = scan(Prefilter(CATALOGUE), "log", parts)
    return [(hit.line, hit.text) for hit in scanned.hits]


def test_lines_count_as_grep_does(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"one\r\ntwo\x1b[31m bo\x1b[0mom 1\n\nlast boom 2")
    assert read(path)[0] == [(2, "two boom 1"), (4, "last boom 2")]


@pytest.mark.parametrize("size", [1, 7, BLOCK - 3, BLOCK, 3 * BLOCK])
def test_wherever_a_block_ends(tmp_path: Path, size: int) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"x" * (size - 1) + b"\n" + b"a boom 1\n" + b"y" * 100 + b"\nboom 2\n")
    assert read(path)[0] == [(2, "a boom 1"), (4, "boom 2")]


def test_a_line_of_a_hundred_megabytes_is_cut_to_the_surroundings_of_the_match() -> None:
    chunk = b"z" * BLOCK
    log = Log("log", io.BytesIO(b"first\n" + chunk * 40 + b" boom 7 " + chunk * 40 + b"\nboom 8\n"), None)  # type: ignore[arg-type]
    (long, short) = found_in(*read_blocks(log))
    assert long[0] == 2
    assert "boom 7" in long[1]
    assert len(long[1]) <= 1024
    assert short == (3, "boom 8")


def test_progress_that_draws_over_its_line() -> None:
    bar = b"".join(b"\r %d%%|##| %d/100" % (n, n) for n in range(100))
    (hit,) = found_in(bar + b"\rboom 3\r done\n")
    assert hit == (1, "boom 3")


def test_binary_garbage_is_ignored(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(os.urandom(300_000) + b"\nboom 1\n\xff\xfe boom 2\n")
    assert [text for _, text in read(path)[0]][-2:] == ["boom 1", "�� boom 2"]


def test_a_compressed_and_a_truncated_log(tmp_path: Path) -> None:
    whole = gzip.compress(b"boom 1\n" + os.urandom(50_000) + b"\n")
    (tmp_path / "a.gz").write_bytes(whole)
    (tmp_path / "b.gz").write_bytes(whole[:-20_000])
    for name in ("a.gz", "b.gz"):
        found, limits = read(tmp_path / name)
        assert (1, "boom 1") in found
        assert bool(limits) == (name == "b.gz")


def test_what_has_no_end_or_is_no_file_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "link").symlink_to("/dev/zero")
    (tmp_path / "folder").mkdir()
    for name in ("fifo", "link", "folder", "missing"):
        with pytest.raises(Unreadable, match=name):
            open_log(tmp_path / name)
    (tmp_path / "log").write_text("x\n")
    (tmp_path / "other").symlink_to(tmp_path / "log")
    with pytest.raises(Unreadable):
        open_log(tmp_path / "other", follow=False)


def test_of_a_folder_what_may_be_logs(tmp_path: Path) -> None:
    for name in ("a.log", "deep/b.out", "weights.safetensors"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x\n")
    (tmp_path / "link.log").symlink_to(tmp_path / "a.log")
    logs, trouble = offline.open_logs([str(tmp_path)])
    assert [log.name for log in logs] == ["a.log", "deep/b.out"]
    assert trouble == []
    for log in logs:
        log.close()


def test_of_what_is_too_much_head_and_tail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "HEAD_BYTES", 1 << 20)
    monkeypatch.setattr(files, "TAIL_BYTES", 1 << 20)
    path = tmp_path / "log"
    lines = [b"boom 1\n", *([b"a line of no account\n"] * 500_000), b"boom 2\n"]
    path.write_bytes(b"".join(lines))
    found, limits = read(path, is_cut=True)
    assert found == [(1, "boom 1"), (500_002, "boom 2")]
    assert limits == ["of 10.0 MiB 8.0 in the middle were skipped"]


def test_a_log_of_ten_gigabytes_costs_no_memory(tmp_path: Path) -> None:
    """A sparse file: its holes are NULs without a line's end."""
    path = tmp_path / "log"
    with path.open("wb") as file:
        file.write(b"boom 1\n")
        file.truncate(10 << 30)
    with open_log(path) as log:
        sizes = [len(block) for block in itertools.islice(read_blocks(log, is_cut=True), 20)]
    assert len(sizes) == 20
    assert max(sizes) <= 5 * BLOCK
