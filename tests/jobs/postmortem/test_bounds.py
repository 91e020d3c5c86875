"""Test jobs that leave too much to read, or what no database stores: the verdict comes and lists what it lacks."""

from __future__ import annotations

import errno
import io
import json
import os
import resource
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from django.utils import timezone

from diagnosis import offline
from diagnosis.logs import files
from diagnosis.logs.files import BLOCK, Log
from diagnosis.offline import log_from_text
from diagnosis.signatures.catalogue import shipped_catalogue
from diagnosis.signs import flight_recorder, rank_exits, stacks
from jobs import restart_incidents
from jobs.disk import rundir
from jobs.following import ending
from jobs.following.end_causes.cause import AttemptEnd
from jobs.models import Attempt, Event, Incident
from jobs.postmortem import incidents
from jobs.postmortem.evidence import collected, ranks
from tests.jobs.postmortem.attempt_files import ALONE, Left, texts

pytestmark = pytest.mark.django_db
OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB\n"
FULL = "OSError: [Errno 28] No space left on device\n"


@pytest.fixture
def few_files() -> Iterator[None]:
    """A process that may have few files open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    there = len(os.listdir("/proc/self/fd"))  # earlier tests may have left some open
    resource.setrlimit(resource.RLIMIT_NOFILE, (there + 200, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_more_logs_than_may_be_open_at_once(left: Left, few_files: None) -> None:
    for rank in range(300):
        left.write(f"logs/0.{rank}.log", ALONE)
    left.write("logs/0.299.log", OOM)
    incident, report = left.diagnosed()
    assert (incident.cause, incident.rank) == ("memory.gpu_oom", 299)
    assert not [item for item in report["not_seen"] if "log" in item and "kernel" not in item]


def test_a_log_that_cannot_be_read_is_reported_as_missing(left: Left, monkeypatch: pytest.MonkeyPatch) -> None:
    open_under, requests = rundir.open_under, []

    def broken(root: Path, relative: str) -> int:
        requests.append(relative)
        if relative.endswith("logs/0.0.log") and requests.count(relative) > 1:  # it was there when they were listed
            raise OSError(errno.EIO, "Input/output error")
        return open_under(root, relative)

    left.write("logs/0.1.log", OOM)
    monkeypatch.setattr(rundir, "open_under", broken)
    incident, report = left.diagnosed()
    assert incident.cause == "memory.gpu_oom"
    assert "0.0.log: Input/output error" in report["not_seen"]


def test_of_too_many_ranks_the_launchers_logs_are_read(left: Left, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "MAX_LOGS", 1)
    left.write("logs/launcher.1.log", FULL)
    left.write("logs/launcher.7.log", OOM)
    incident, report = left.diagnosed()
    assert incident.cause == "storage.full"
    assert "the logs of 1 ranks: only 1 are read" in report["not_seen"]
    assert "launcher.7.log" not in str(report), "there are two nodes"


def test_a_requeued_attempt_goes_on_in_the_first_ones_log(left: Left) -> None:
    (left.folder.parent / "batch.1.log").write_text(FULL)
    Attempt.objects.filter(pk=left.attempt.pk).update(number=3)
    Attempt.objects.create(job=left.attempt.job, number=1, scheduler_id="7", state="requeued", token_digest="x")
    left.attempt.refresh_from_db()
    assert left.diagnosed()[0].cause == "storage.full"


def test_ends_of_nodes_that_it_does_not_have(left: Left, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_exits, "MAX_RANKS", 2)
    left.ends(0, r0=(1, None, 2.0))
    left.ends(1, r1=(None, 11, 4.0), r3=(None, 11, 9.0))
    left.ends(2, r2=(None, 9, 30.0))
    _, report = left.diagnosed()
    text = " ".join(texts(report, "root") + texts(report, "confirmation"))
    assert "rank 1 ended by SIGSEGV" in text
    assert "rank 2" not in text
    assert "rank 3" not in text


def test_once_its_time_is_over_each_source_reports_it(left: Left, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collected, "MAX_COLLECTING_S", -1.0)
    incident, report = left.diagnosed()
    assert (incident.cause, incident.version) == ("unknown", 1)
    assert {"ranks' logs: no time was left", "other failures at that time: no time was left"} <= {*report["not_seen"]}


@pytest.mark.parametrize(
    "data",
    [{"rank": 5_000_000_000}, {"rank": 10**30}, {"error": 5, "failure": {}}, {"signal": [], "exit_code": "7"}],
    ids=str,
)
def test_what_no_database_takes_of_a_restart_in_place(left: Left, data: dict[str, Any]) -> None:
    about = {"incarnation": 0, "failure": "exception", "rank": 1, "exit_code": 1, "error": "x", **data}
    incident = Incident.objects.create(
        attempt=left.attempt, incarnation=0, at=timezone.now(), due_at=timezone.now(), project=left.attempt.job.project
    )
    Event.objects.bulk_create(
        [Event(attempt=left.attempt, time=timezone.now(), kind=restart_incidents.ENDED, incarnation=0, data=about)]
    )
    assert incidents.diagnose(incident.pk)


def test_a_verdict_that_cannot_be_stored_is_given_up_as_if_it_could_not_be_made(
    left: Left, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(incidents, "fingerprint", lambda verdict: 1 / (verdict.cause == "unknown"))
    left.write("logs/0.1.log", OOM)
    assert ending.end(left.attempt, AttemptEnd("failed", 1, result=left.failure))
    assert not incidents.diagnose(Incident.objects.get().pk)
    assert Incident.objects.get().version == 0
    for _ in range(4):
        Incident.objects.update(due_at=timezone.now())
        incidents.diagnose(Incident.objects.get().pk)
    incident = Incident.objects.get()
    assert (incident.version, incident.is_final) == (1, True)
    assert "ZeroDivisionError" in incident.says


class TestRecords:
    """The budget covers flight recorders, stacks and the scheduler's tables."""

    @staticmethod
    def flight(rank: object, calls: range, operation: str = "nccl:all_reduce") -> str:
        entries = [
            {"profiling_name": operation, "process_group": ["0", "pg"], "collective_seq_id": number, "input_sizes": [1]}
            for number in calls
        ]
        return json.dumps({"entries": entries, "rank": rank})

    def test_of_a_group_the_newest_calls(self) -> None:
        flight = flight_recorder.parse_flight("0.1.json", self.flight(1, range(1000)))
        assert flight is not None
        assert [number for _, number in flight.started] == [*range(1000 - flight_recorder.NEWEST, 1000)]

    @pytest.mark.parametrize("rank", [10**30, -1, "1", None])
    def test_a_rank_that_is_none(self, rank: object) -> None:
        assert flight_recorder.parse_flight("0.1.json", self.flight(rank, range(3))) is None

    def test_halves_of_pairs(self) -> None:
        reports = [self.flight(0, range(3)), self.flight(1, range(3), "nccl:\ud800gather")]
        flights = [flight for text in reports if (flight := flight_recorder.parse_flight("0.1.json", text)) is not None]
        (sign,) = flight_recorder.signs_of_flights(flights)
        assert "called gather of [1]" in sign.text
        assert sign.text.encode()

    def test_what_there_is_no_place_for_is_reported(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(offline, "MAX_CALLS", 5)
        logs = [log_from_text(self.flight(rank, range(3)), f"0.{rank}.json") for rank in range(4)]
        verdict = offline.diagnose_logs(logs)
        assert "0.2.json and 1 more files: skipped, too much to read" in verdict.unavailable

    def test_a_dump_of_ours_is_one_process(self, left: Left) -> None:
        spied = "".join(f"Process {n}: python\nThread {n} (idle)\n    f (a.py:1)\n" for n in range(9_000))
        assert len(stacks.parse_stacks("spied.txt", spied)) == stacks.MAX_PROCESSES
        left.write("stacks/0.0.txt", spied)
        assert not [item for item in left.diagnosed()[1]["evidence"] if item["file"] == "stacks/0.0.txt"]


class TestTime:
    """The budget is for all logs together; of the logs that exceed it only the ends are read."""

    def test_once_it_is_over_the_ends_are_read(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(files, "TAIL_BYTES", 64 * 1024)
        lines = "a line of no account\n" * (2 * BLOCK // 21)
        verdicts = []
        for seconds in (60.0, -1.0, -100.0):
            monkeypatch.setattr(files, "SECONDS", seconds)
            logs = [log_from_text(lines + lines + last, f"0.{rank}.log") for rank, last in enumerate([ALONE, OOM])]
            verdicts.append(offline.diagnose_logs(logs))
        whole, late, over = verdicts
        assert {(item.cause, item.rank) for item in verdicts} == {("memory.gpu_oom", 1)}
        roots = [next(item for item in verdict.evidence if item.role == "root") for verdict in (whole, late)]
        assert roots[0].line == roots[1].line, "lines that are passed over are counted as long as there is time"
        assert not [item for item in whole.unavailable if "in the middle" in item]
        for verdict in (late, over):
            assert len([item for item in verdict.unavailable if "in the middle were skipped" in item]) == 2

    def test_time_is_for_all_of_them(self, monkeypatch: pytest.MonkeyPatch) -> None:
        clock = [1000.0]

        class Slow(io.BytesIO):
            """A log of which each block takes a second to read."""

            def read1(self, size: int | None = -1, /) -> bytes:
                clock[0] += 1
                return super().read1(size)

        monkeypatch.setattr(time, "monotonic", lambda: clock[0])
        monkeypatch.setattr(files, "SECONDS", 20.0)
        monkeypatch.setattr(files, "TAIL_BYTES", 1)
        data = b"a line of no account\n" * (8 * BLOCK // 21)
        read = offline.read_logs(
            [Log(f"0.{rank}.log", Slow(data), len(data)) for rank in range(5)], shipped_catalogue()
        )
        assert [bool(item.limits) for item in read.scanned] == [False, False, True, True, True]
