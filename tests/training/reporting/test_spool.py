"""Test that spool files are read back exactly, from any offset, however they were left and whatever they contain."""

from __future__ import annotations

import json
import math
import os
import random
from pathlib import Path
from typing import Any

import pytest

from training.reporting import spool as spooling
from training.reporting.lines import ReportBatch
from training.reporting.spool import LINE_BYTES, Spool, open_folder, read_spool, spool_names

ID = "0123456789abcdef"
HEADER = {
    "stream": ID, "version": 1, "incarnation": 0, "rank": 2, "node": "dgx01", "boot_id": "b", "restart_count": 0,
    "time": 1.5,
}  # fmt: skip


def _batch(seq: int, **more: Any) -> dict[str, Any]:
    return {"seq": seq, "time": 10.0 + seq, "series": {"loss": [[seq, seq / 2]]}, "events": [], **more}


def _line(thing: object) -> bytes:
    return json.dumps(thing).encode() + b"\n"


def _write(folder: Path, *lines: object, name: str = f"0.2.{ID}.jsonl") -> Path:
    path = folder / name
    with open(path, "ab") as file:
        for line in lines:
            file.write(line if isinstance(line, bytes) else _line(line))
    return path


def _damaged(batch: ReportBatch) -> bool:
    return not batch.series and [event["kind"] for event in batch.events] == ["report.damaged"]


def test_a_stream_is_read_whole(tmp_path: Path) -> None:
    path = _write(tmp_path, HEADER, _batch(0), _batch(1, events=[{"kind": "x", "time": 1}]), {"end": True, "seq": 2})
    header, batches, ended = read_spool(path)
    assert header is not None
    assert (header.stream, header.rank, header.node) == (ID, 2, "dgx01")
    assert [batch.seq for batch in batches] == [0, 1]
    assert batches[1].series == {"loss": [(1, 0.5)]}
    assert batches[1].events == [{"kind": "x", "time": 1}]
    assert ended


def test_reading_goes_on_as_the_file_grows_at_any_byte(tmp_path: Path) -> None:
    """A reader that reads every prefix gets every batch once, and none before its line is complete."""
    whole = b"".join(_line(thing) for thing in (HEADER, _batch(0), _batch(1), _batch(2), {"end": True, "seq": 3}))
    path = _write(tmp_path, whole[:1])
    spool = Spool(open_folder(tmp_path), path.name)
    numbers: list[int] = []
    for at in range(1, len(whole)):
        numbers += [batch.seq for batch in spool.read()]
        assert len(numbers) <= max(0, whole[:at].count(b"\n") - 1)
        _write(tmp_path, whole[at : at + 1])
    numbers += [batch.seq for batch in spool.read()]
    assert numbers == [0, 1, 2]
    assert spool.has_ended
    assert spool.next_seq == 3


def test_a_torn_last_line_is_ignored(tmp_path: Path) -> None:
    path = _write(tmp_path, HEADER, _batch(0), _line(_batch(1))[:-7])
    _, batches, ended = read_spool(path)
    assert [batch.seq for batch in batches] == [0]
    assert not ended


def test_any_place_can_be_sought(tmp_path: Path) -> None:
    path = _write(tmp_path, HEADER, *(_batch(seq) for seq in range(100)))
    spool = Spool(open_folder(tmp_path), path.name)
    assert len(spool.read(limit=30)) == 30
    choose = random.Random(1)
    for seq in [0, 99, 50, *(choose.randrange(100) for _ in range(20))]:
        spool.seek(seq)
        assert spool.next_seq == seq
        assert spool.read(limit=2)[0] == read_spool(path, seq)[1][0]
    spool.seek(500)
    assert spool.next_seq == 100
    _write(tmp_path, _batch(100))
    assert [batch.seq for batch in spool.read()] == [100]


def test_a_place_is_sought_over_long_lines_and_segments(tmp_path: Path) -> None:
    """Counting newlines passes by as many lines as reading them does."""
    name = f"0.2.{ID}.jsonl"
    long = b"x" * (2 * LINE_BYTES + 7) + b"\n"
    _write(tmp_path, HEADER, *(_batch(seq) for seq in range(9)), long, _batch(10), name=name)
    _write(tmp_path, *(_batch(seq) for seq in range(11, 40)), b'{"torn', name=f"{name}.1")
    _write(tmp_path, *(_batch(seq) for seq in range(41, 60)), name=f"{name}.2")
    for seq in range(60):
        spool = Spool(open_folder(tmp_path), name)
        spool.read(0)
        spool.seek(seq)
        batch = spool.read(1)[0]
        assert batch.seq == seq
        assert _damaged(batch) == (seq in {9, 40})


def test_a_later_reader_goes_on_from_a_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = _write(tmp_path, HEADER, *(_batch(seq) for seq in range(100)))
    earlier = Spool(open_folder(tmp_path), path.name)
    earlier.read(80)
    place = earlier.position
    assert place is not None
    later = Spool(open_folder(tmp_path), path.name)
    later.read(0)
    with monkeypatch.context() as patch:
        patch.setattr(Spool, "_skip_lines", None)  # nothing is to be counted
        later.seek(80, hint=place)
    assert [batch.seq for batch in later.read(2)] == [80, 81]
    later.seek(10, hint=place)  # beyond what is wanted: of no use
    assert [batch.seq for batch in later.read(1)] == [10]
    later.seek(90, until=0)
    assert later.next_seq == 11


def test_seeking_back_reopens_an_ended_stream(tmp_path: Path) -> None:
    path = _write(tmp_path, HEADER, _batch(0), _batch(1), {"end": True, "seq": 2})
    spool = Spool(open_folder(tmp_path), path.name)
    assert len(spool.read()) == 2
    assert spool.has_ended
    spool.seek(1)
    assert not spool.has_ended
    assert [batch.seq for batch in spool.read()] == [1]
    assert spool.has_ended


def test_segments_form_a_single_stream(tmp_path: Path) -> None:
    name = f"0.2.{ID}.jsonl"
    _write(tmp_path, HEADER, _batch(0), name=name)
    _write(tmp_path, _batch(1), _batch(2), name=f"{name}.1")
    spool = Spool(open_folder(tmp_path), name)
    assert [batch.seq for batch in spool.read()] == [0, 1, 2]
    before = spool.size()
    _write(tmp_path, _batch(3), name=f"{name}.2")
    assert spool.size() > before
    assert [batch.seq for batch in spool.read()] == [3]
    spool.seek(1)
    assert [batch.seq for batch in spool.read()] == [1, 2, 3]


def test_a_line_torn_before_a_later_segment_takes_its_place(tmp_path: Path) -> None:
    name = f"0.2.{ID}.jsonl"
    _write(tmp_path, HEADER, _batch(0), b'{"seq": 1, "ti', name=name)
    _write(tmp_path, _batch(2), name=f"{name}.1")
    _, batches, _ = read_spool(tmp_path / name)
    assert [batch.seq for batch in batches] == [0, 1, 2]
    assert _damaged(batches[1])


@pytest.mark.parametrize(
    "line",
    [
        b"\n",
        b"not json\n",
        b"\xff\xfe\x00\n",
        b"[1, 2]\n",
        b'{"seq": 1}\n',
        b'{"seq": 7, "time": 1, "series": {}, "events": []}\n',
        b'{"seq": true, "time": 1}\n',
        b'{"seq": 1, "time": NaN}\n',
        b'{"seq": 1, "time": 1e999}\n',
        b'{"seq": 1, "time": -5}\n',
        b'{"seq": 1, "time": 1, "series": []}\n',
        b'{"seq": 1, "time": 1, "series": {"loss": [[1]]}}\n',
        b'{"seq": 1, "time": 1, "series": {"loss": [[1, true]]}}\n',
        b'{"seq": 1, "time": 1, "series": {"loss": [[-1, 0.5]]}}\n',
        b'{"seq": 1, "time": 1, "series": {"loss": [[1.5, 0.5]]}}\n',
        b'{"seq": 1, "time": 1, "series": {"loss": [[1, "nan"]]}}\n',
        b'{"seq": 1, "time": 1, "series": {"loss": [[1, 1e999]]}}\n',
        b'{"seq": 1, "time": 1, "series": {"loss": [[1, ' + b"9" * 5000 + b"]]}}\n",
        b'{"seq": 1, "time": 1, "series": {"../loss\\n": [[1, 1]]}}\n',
        b'{"seq": 1, "time": 1, "events": [{"kind": 5, "time": 1}]}\n',
        b'{"seq": 1, "time": 1, "events": [{"kind": "a\\u0000b", "time": 1}]}\n',
        b'{"seq": 1, "time": 1, "events": [{"kind": "a"}]}\n',
        b'{"seq": 1, "time": 1, "events": [{"kind": "a", "time": 1, "x": 1e999}]}\n',
        b'{"seq": 1, "time": 1, "events": [{"kind": "a", "time": 1, "x": "' + b"y" * 70_000 + b'"}]}\n',
        b'{"seq": 1, "time": 1, "events": ' + b"[" * 100_000 + b"]" * 100_000 + b"}\n",
        b'{"seq": 1, "time": 1, "series": {"loss": [' + b"[1,1]," * 30_000 + b"[1,1]]}}\n",
        b"x" * (LINE_BYTES + 5) + b"\n",
        b"y" * (3 * LINE_BYTES) + b"\n",
    ],
    ids=lambda line: line[:40].decode(errors="replace").strip()[:40],
)
def test_a_broken_line_takes_its_place_and_nothing_else(tmp_path: Path, line: bytes) -> None:
    path = _write(tmp_path, HEADER, _batch(0), line, _batch(2), {"end": True, "seq": 3})
    _, batches, ended = read_spool(path)
    assert [batch.seq for batch in batches] == [0, 1, 2]
    assert _damaged(batches[1])
    assert batches[2].series == {"loss": [(2, 1.0)]}
    assert ended
    json.dumps([batch.events for batch in batches], allow_nan=False)


def test_infinities_come_back(tmp_path: Path) -> None:
    series = {"loss": [[0, "NaN"], [1, "Infinity"], [2, "-Infinity"], [3, 7]]}
    _, (batch,), _ = read_spool(_write(tmp_path, HEADER, _batch(0, series=series)))
    values = [value for _, value in batch.series["loss"]]
    assert math.isnan(values[0])
    assert values[1:] == [math.inf, -math.inf, 7.0]


@pytest.mark.parametrize(
    "change",
    [
        {"stream": "f" * 16},
        {"rank": 3},
        {"incarnation": 1},
        {"version": 2},
        {"node": 5},
        {"node": "a\x00b"},
        {"node": "n" * 300},
        {"restart_count": -1},
        {"time": "now"},
    ],
    ids=str,
)
def test_a_header_that_contradicts_the_name_speaks_for_nobody(tmp_path: Path, change: dict[str, Any]) -> None:
    header, batches, ended = read_spool(_write(tmp_path, {**HEADER, **change}, _batch(0)))
    assert header is None
    assert batches == []
    assert ended


def test_only_regular_files_are_read(tmp_path: Path) -> None:
    """Links, pipes, devices and folders under a right name neither leak nor block."""
    secret = _write(tmp_path, HEADER, _batch(0))
    spool_folder = tmp_path / "spool"
    spool_folder.mkdir()
    (spool_folder / f"0.2.{ID}.jsonl").symlink_to(secret)
    os.mkfifo(spool_folder / f"0.3.{ID}.jsonl")
    (spool_folder / f"0.4.{ID}.jsonl").symlink_to("/dev/zero")
    (spool_folder / f"0.5.{ID}.jsonl").mkdir()
    (spool_folder / "notes.txt").write_text("hello")
    directory = open_folder(spool_folder)
    assert spool_names(directory) == []
    for rank in (2, 3, 4, 5):
        spool = Spool(directory, f"0.{rank}.{ID}.jsonl")
        assert spool.read() == []
        assert spool.header is None
    for name in ("../0.2.x.jsonl", "0.2.jsonl", f"0.2.{ID}.jsonl/..", f"0.2.{ID}.jsonl.1"):
        with pytest.raises(ValueError, match="not the name"):
            Spool(directory, name)


def test_a_sparse_terabyte_is_given_up(tmp_path: Path) -> None:
    path = _write(tmp_path, HEADER, _batch(0))
    os.truncate(path, 2**40)
    _, batches, ended = read_spool(path)
    assert [batch.seq for batch in batches] == [0]
    assert ended


def test_names_come_in_order(tmp_path: Path) -> None:
    for name in ("1.0", "0.10", "0.2", "0.-1"):
        (tmp_path / f"{name}.{ID}.jsonl").touch()
    (tmp_path / f"0.2.{ID}.jsonl.1").touch()
    names = spool_names(open_folder(tmp_path))
    assert [name.split(f".{ID}")[0] for name in names] == ["0.-1", "0.2", "0.10", "1.0"]


def test_a_folder_may_hold_any_number_of_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spooling, "ENTRIES", 10)
    for number in range(20):
        (tmp_path / f"0.{number}.{number:016x}.jsonl").touch()
    folder = open_folder(tmp_path)
    try:
        assert len(spool_names(folder)) == 10
    finally:
        os.close(folder)


def test_long_lines_are_read_few_at_once(tmp_path: Path) -> None:
    """Every read is short, however much a job wrote, and every line arrives."""
    path = tmp_path / f"0.2.{ID}.jsonl"
    wide = {"series": {"loss": [[step, step / 7] for step in range(15_000)]}}
    path.write_bytes(_line(HEADER) + b"".join(_line(_batch(seq, **wide)) for seq in range(20)))
    folder = open_folder(tmp_path)
    try:
        spool, found = Spool(folder, path.name), []
        while batches := spool.read():
            assert len(batches) < 6
            found += batches
        assert [batch.seq for batch in found] == list(range(20))
    finally:
        os.close(folder)
