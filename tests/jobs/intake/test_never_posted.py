"""Test collecting reports that were never posted from the spools, once, whatever the files contain."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from django.utils import timezone

from jobs.intake import reports, spools, wire
from jobs.models import Event, Stream
from tests.jobs.reporting import Spooled, attempt_of, post, stored, world
from training.reporting.lines import StreamHeader
from training.reporting.spool import Spool

pytestmark = pytest.mark.django_db


def spool(root: Path, stream: Spooled, *, torn: bytes = b"", end: bool = False) -> Path:
    """The file that the stream's rank left behind."""
    folder = root / "job" / "attempt-1" / "spool"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{stream.incarnation}.{stream.rank}.{stream.uid}.jsonl"
    header = {
        "stream": stream.uid, "version": 1, "incarnation": stream.incarnation, "rank": stream.rank,
        "node": "n", "boot_id": "b", "restart_count": 0, "time": 1000.0,
    }  # fmt: skip
    lines: list[dict[str, Any]] = [header]
    for seq, batch in enumerate(stream.batches):
        lines.append({"seq": seq, "time": batch.time, "series": batch.series, "events": batch.events})
    if end:
        lines.append({"end": True, "seq": len(stream.batches), "time": 1.0})
    path.write_bytes(b"".join(json.dumps(line).encode() + b"\n" for line in lines) + torn)
    return path


def test_collecting_takes_what_was_never_posted_and_only_that(tmp_path: Path) -> None:
    attempt = attempt_of(directory="attempt-1")
    posted, unknown = Spooled(rank=0), Spooled(rank=1)
    for step in range(200):
        posted.log(step, loss=step / 2).add_event("note", number=step)
        unknown.log(step, loss=step / 4)
    reports.ingest(attempt.pk, post((posted, 0, 150)))
    spool(tmp_path, posted, torn=b'{"seq": 400, "ser')
    spool(tmp_path, unknown, end=True)
    assert spools.collect(attempt, tmp_path) == 250 + 200
    found = stored(attempt)
    assert len(found) == 400
    assert all(len(values) == 1 for values in found.values())
    assert dict(Stream.objects.values_list("rank", "ended")) == {0: False, 1: True}
    before = world(attempt)
    assert spools.collect(attempt, tmp_path) == 0
    assert world(attempt) == before


def test_collecting_goes_on_where_it_left_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A killed job leaves no end line and has posted nearly everything; nothing may be counted twice."""
    attempt = attempt_of(directory="attempt-1")
    stream = Spooled()
    for step in range(300):
        stream.log(step, loss=step / 2)
    reports.ingest(attempt.pk, post((stream, 0, 290)))
    path = spool(tmp_path, stream)
    assert spools.collect(attempt, tmp_path) == 10
    row = Stream.objects.get()
    assert (row.next_seq, row.place_seq, row.place_offset) == (300, 300, path.stat().st_size)
    monkeypatch.setattr(Spool, "_skip_lines", None)
    stream.log(300, loss=1.0)
    spool(tmp_path, stream)
    assert spools.collect(attempt, tmp_path) == 1
    assert Stream.objects.get().place_seq == 301


def test_collecting_hostile_spools_takes_the_good_spool(tmp_path: Path) -> None:
    attempt = attempt_of(directory="attempt-1")
    good = spool(tmp_path, Spooled(rank=0).log(1, loss=1.0))
    folder = good.parent
    (folder / f"0.1.{'1' * 16}.jsonl").symlink_to(good)
    os.mkfifo(folder / f"0.2.{'2' * 16}.jsonl")
    (folder / f"0.3.{'3' * 16}.jsonl").mkdir()
    (folder / f"0.4.{'4' * 16}.jsonl").write_bytes(b"{}\n")
    sparse = folder / f"0.5.{'5' * 16}.jsonl"
    with sparse.open("wb") as file:
        file.truncate(1 << 40)
    stranger = Spooled(rank=6)
    stranger.batches.append(stranger.log(1, loss=1.0).batches[0])
    spool(tmp_path, stranger).write_text('{"stream": "nonsense"}\n' * 3)
    spool(tmp_path, Spooled(rank=7).add_event("weird", text="\ud800", big=2**70).log(2, loss=2.0))
    spools.collect(attempt, tmp_path)
    assert set(stored(attempt)) == {("loss", 0, 0, 1), ("loss", 0, 7, 2)}
    assert Event.objects.get(kind="weird").data == {"text": "\ufffd", "big": 2**70}


def test_a_node_with_half_a_surrogate_pair_is_collected(tmp_path: Path) -> None:
    attempt = attempt_of(directory="attempt-1")
    path = spool(tmp_path, Spooled(rank=0).log(1, loss=1.0))
    path.write_text(path.read_text().replace('"node": "n"', r'"node": "n\udc80"'))
    assert spools.collect(attempt, tmp_path) == 1
    assert Stream.objects.get().node == "n\ufffd"


def test_a_stream_that_nobody_can_take_does_not_hold_up_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempt = attempt_of(directory="attempt-1")
    for rank in range(3):
        spool(tmp_path, Spooled(rank=rank).log(1, loss=1.0))
    of_spool = wire.post_from_spool

    def failing(header: StreamHeader, batches: Any, *, end: bool) -> wire.ReportPost:
        if header.rank == 1:
            raise KeyError("something that nobody thought of")
        return of_spool(header, batches, end=end)

    monkeypatch.setattr(wire, "post_from_spool", failing)
    assert spools.collect(attempt, tmp_path) == 2
    assert {rank for _, _, rank, _ in stored(attempt)} == {0, 2}


def test_a_spool_folder_that_leads_elsewhere_is_not_followed(tmp_path: Path) -> None:
    attempt = attempt_of(directory="attempt-1")
    elsewhere = tmp_path / "elsewhere"
    spool(elsewhere, Spooled().log(1, loss=1.0))
    (tmp_path / "run" / "job").mkdir(parents=True)
    (tmp_path / "run" / "job" / "attempt-1").symlink_to(elsewhere / "job" / "attempt-1")
    assert spools.collect(attempt, tmp_path / "run") == 0
    attempt.directory = ""
    assert spools.collect(attempt, tmp_path / "run") == 0
    assert not Stream.objects.exists()


def test_a_closed_attempt_is_not_collected(tmp_path: Path) -> None:
    attempt = attempt_of(directory="attempt-1", closed_at=timezone.now())
    spool(tmp_path, Spooled().log(1, loss=1.0))
    assert spools.collect(attempt, tmp_path) == 0


@pytest.mark.parametrize("depth", [64, 485, 20_000])
def test_a_deep_event_in_a_spool_is_passed(depth: int, tmp_path: Path) -> None:
    attempt = attempt_of(directory="attempt-1")
    path = spool(tmp_path, Spooled(rank=0).add_event("deep", data="?").log(5, loss=1.0))
    path.write_text(path.read_text().replace('"?"', "[" * depth + "]" * depth))
    assert spools.collect(attempt, tmp_path) == 2
    assert Event.objects.get().kind == "report.damaged"
    assert len(stored(attempt)) == 1
