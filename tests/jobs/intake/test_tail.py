"""Test reading spools as they grow, where nodes cannot reach the portal: every point once, soon, and cheaply."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext

from jobs import lease
from jobs.disk import rundir
from jobs.following import follow
from jobs.intake import reports, spools, tail
from jobs.models import Attempt, Event, Stream
from nodes.schedulers.base import JobStatus
from tests.jobs.reporting import Spooled, attempt_of, job_of, post, stored
from tests.jobs.schedulers import ScriptedScheduler
from training.reporting import spool as spooling

pytestmark = pytest.mark.django_db


@pytest.fixture(autouse=True)
def _afresh() -> Iterator[None]:
    tail._watched.clear()
    yield
    tail._watched.clear()


class Rank:
    """A rank that appends to its spool, a line at a time."""

    def __init__(self, attempt: Attempt, rank: int = 0) -> None:
        self.stream = Spooled(rank=rank)
        folder = rundir.path_of(attempt.job.directory) / "job" / attempt.directory / "spool"
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / f"0.{rank}.{self.stream.uid}.jsonl"
        self.seq = self.segment = 0
        header = {"stream": self.stream.uid, "version": 1, "incarnation": 0, "rank": rank, "node": "n"}
        self.write({**header, "boot_id": "b", "restart_count": 0, "time": 1000.0})

    def write(self, *lines: dict[str, Any], torn: str = "") -> None:
        path = Path(f"{self.path}.{self.segment}") if self.segment else self.path
        with path.open("a") as file:
            file.write("".join(json.dumps(line) + "\n" for line in lines) + torn)

    def log(self, *steps: int) -> None:
        for step in steps:
            self.write({"seq": self.seq, "time": 1000.0, "series": {"loss": [[step, step / 2]]}, "events": []})
            self.seq += 1

    def end(self) -> None:
        self.write({"end": True, "seq": self.seq, "time": 1000.0})


def running(name: str = "ada", *, ranks: int = 1, **fields: Any) -> tuple[Attempt, list[Rank]]:
    """An attempt whose launcher has made its folder, and its ranks."""
    job = job_of(name)
    job.directory = f"default/{job.pk}-abcdef"
    job.save()
    given = {"tailed": True, "scheduler_id": str(job.pk), "directory": "attempt-1"} | fields
    attempt = attempt_of(job, **given)
    root = rundir.path_of(job.directory)
    (root / "portal").mkdir(parents=True)
    (root / "job" / "attempt-1" / "spool").mkdir(parents=True)
    return attempt, [Rank(attempt, rank) for rank in range(ranks)]


def steps(attempt: Attempt) -> list[int]:
    """Return the stored steps, and check that each is stored once."""
    found = stored(attempt)
    assert all(len(values) == 1 for values in found.values())
    return sorted(step for _, _, _, step in found)


def test_what_grows_is_there_after_the_next_poll() -> None:
    attempt, (rank,) = running()
    rank.log(1, 2)
    assert tail.tick()
    assert steps(attempt) == [1, 2]
    rank.log(3)
    rank.write(torn='{"seq": 3, "ser')
    tail.tick()
    assert steps(attempt) == [1, 2, 3]
    late = Rank(attempt, 1)
    late.log(4)
    late.end()
    tail.tick()
    assert steps(attempt) == [1, 2, 3, 4]
    assert dict(Stream.objects.values_list("rank", "ended")) == {0: False, 1: True}
    attempt.refresh_from_db()
    assert attempt.step == 3  # rank 0's


def test_events_come_the_same_way() -> None:
    _, (rank,) = running()
    event = {"kind": "phase", "time": 1000.0, "phase": "validate"}
    rank.write({"seq": 0, "time": 1000.0, "series": {}, "events": [event]})
    tail.tick()
    assert Event.objects.get().kind == "phase"
    assert Attempt.objects.get().phase == "validate"


def test_while_nothing_comes_no_spool_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """This holds for any number of streams; ended ones are not even opened."""
    attempt, ranks = running(ranks=8)
    for rank in ranks:
        rank.log(1)
    ranks[0].end()
    tail.tick()
    opened: list[str] = []
    reading = tail._bytes

    def noted(folder: int, name: str, segment: int) -> int:
        opened.append(name)
        return reading(folder, name, segment)

    monkeypatch.setattr(tail, "_bytes", noted)
    monkeypatch.setattr(spools, "_collect_stream", lambda *words: pytest.fail("nothing has grown"))
    with CaptureQueriesContext(connection) as queries:
        tail.tick()
    assert len(opened) == 7
    assert len(queries) <= 8  # the attempts, and the lease


def test_nothing_to_read_costs_one_query() -> None:
    running(tailed=False)
    with CaptureQueriesContext(connection) as queries:
        assert not tail.tick()
    assert len(queries) == 1


def test_a_stream_goes_on_in_its_next_segment() -> None:
    attempt, (rank,) = running()
    rank.log(1)
    with rank.path.open("a") as file:  # a long event fills it up
        line = {"seq": 1, "time": 1000.0, "series": {}, "events": [], "x": "y" * (spooling.LINE_BYTES - 200)}
        for seq in range(1, 11):
            file.write(json.dumps({**line, "seq": seq}) + "\n")
    tail.tick()
    rank.segment, rank.seq = 1, 11
    rank.log(2)
    tail.tick()
    rank.log(3)
    tail.tick()
    assert steps(attempt) == [1, 2, 3]


@pytest.mark.lengthy
def test_forged_segments_without_number_hold_nothing_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A poll opens one more file at most, however many segments there seem to be; a tick has several polls."""
    attempt, (rank,) = running()
    rank.log(1)
    os.truncate(rank.path, 17_000_000)
    for segment in range(1, 300):
        Path(f"{rank.path}.{segment}").touch()
        os.truncate(f"{rank.path}.{segment}", 10_000_000)
    opened: list[int] = []
    reading = tail._bytes

    def noted(folder: int, name: str, segment: int) -> int:
        opened.append(segment)
        return reading(folder, name, segment)

    monkeypatch.setattr(tail, "_bytes", noted)
    for _ in range(3):
        opened.clear()
        tail.tick()
        assert len(opened) < 100
    assert steps(attempt) == [1]


def test_empty_segments_are_not_walked_through(monkeypatch: pytest.MonkeyPatch) -> None:
    """Writers start a new segment when one is full: thousands of empty segments are not followed to their end."""
    attempt, (rank,) = running()
    rank.log(1)
    for segment in range(1, 400):
        Path(f"{rank.path}.{segment}").touch()
    read: list[spooling.SpoolPosition] = []
    chunk = spooling.Spool._pread

    def noted(self: spooling.Spool, place: spooling.SpoolPosition, size: int) -> bytes:
        read.append(place)
        return chunk(self, place, size)

    monkeypatch.setattr(spooling.Spool, "_pread", noted)
    tail.tick()
    assert steps(attempt) == [1]
    assert len(read) < 50


def test_a_shipper_that_posts_as_well_doubles_nothing() -> None:
    attempt, (rank,) = running()
    rank.log(1, 2, 3)
    stream = Spooled(rank=0)
    for step in (1, 2):
        stream.log(step, loss=step / 2)
    assert stream.uid == rank.stream.uid
    reports.ingest(attempt.pk, post(stream))
    tail.tick()
    assert steps(attempt) == [1, 2, 3]


def test_a_run_with_much_to_read_keeps_nobody_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attempts take turns, within the budget of a tick."""
    busy, (much,) = running("ada")
    quiet, (little,) = running("bob")
    clock = [0.0]
    order: list[int] = []

    class Time:
        monotonic = staticmethod(lambda: clock[0])

    collect = spools.collect

    def slow(attempt: Attempt, root: Path, *, until: float, streams: Callable[[int], Any]) -> int:
        order.append(attempt.pk)
        taken = collect(attempt, root, streams=streams)
        clock[0] = until if attempt == busy else clock[0] + 0.01
        return taken

    monkeypatch.setattr(tail, "time", Time)
    monkeypatch.setattr(spools, "collect", slow)
    much.log(*range(100))
    little.log(1)
    tail.tick()
    assert order[:2] == [busy.pk, quiet.pk]
    assert order.count(quiet.pk) == 1
    assert clock[0] == pytest.approx(tail.BUDGET_S)
    assert steps(quiet) == [1]
    order.clear()
    tail.tick()
    assert order[0] == quiet.pk  # the attempt that was read last comes last


def test_a_broken_run_affects_no_other(caplog: pytest.LogCaptureFixture) -> None:
    attempt, (rank,) = running("ada")
    rank.log(1)
    for name in ("bob", "eve"):
        _, (other,) = running(name)
        other.path.unlink()
        if name == "bob":
            other.path.parent.rmdir()
        else:
            os.mkfifo(other.path)
    tail.tick()
    assert steps(attempt) == [1]
    assert not [record for record in caplog.records if record.exc_info]


def test_one_at_a_time() -> None:
    attempt, (rank,) = running()
    rank.log(1)
    claim = lease.take("tail")
    assert claim is not None
    assert not tail.tick()
    assert steps(attempt) == []
    claim.release()
    assert tail.tick()


@pytest.mark.parametrize("fields", [{"state": "pending"}, {"tailed": False}, {"scheduler_id": ""}])
def test_others_are_left_alone(fields: dict[str, Any]) -> None:
    attempt, (rank,) = running(**fields)
    rank.log(1)
    tail.tick()
    assert steps(attempt) == []


def test_its_shippers_are_informed(settings: Any, scheduler: ScriptedScheduler) -> None:
    """A token grants access in both directions, also while the job runs."""
    settings.VIGIL_REPORTS = "tail"
    attempt, (rank,) = running(tailed=False)
    now = time.time()
    scheduler.jobs[attempt.scheduler_id] = JobStatus(scheduler_id=attempt.scheduler_id, state="running", started_at=now)
    follow.tick(scheduler)
    file = rundir.path_of(attempt.job.directory) / "portal" / "token"
    assert json.loads(file.read_text())["reports"] == "tail"
    attempt.refresh_from_db()
    assert attempt.tailed
    rank.log(1)
    tail.tick()
    assert steps(attempt) == [1]
    settings.VIGIL_REPORTS = "post"
    follow.tick(scheduler)
    assert json.loads(file.read_text())["reports"] == "post"
    before = file.read_text()
    follow.tick(scheduler)
    assert file.read_text() == before
