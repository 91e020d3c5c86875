"""Test logs: pages, cursors, search, and invalid requests."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from jobs.disk import logs, rundir
from jobs.disk.logs import LogPage, LogSelection, available, read
from jobs.errors import LogError
from jobs.models import Attempt, Job
from tests.lab import a_job, a_project, on_disk, person

pytestmark = pytest.mark.django_db


@pytest.fixture
def job() -> Job:
    project = a_project()
    job = a_job(person("oskar", project), project, state="running", attempt={"scheduler_id": "7"})
    on_disk(job)
    assert job.latest is not None
    folder = rundir.path_of(job.directory) / "job" / "attempt-1"
    (folder / "logs").mkdir(parents=True)
    (folder / "owner.json").write_text(json.dumps({"scheduler_id": "7", "restart_count": 0}))
    return job


@pytest.fixture
def attempt(job: Job) -> Attempt:
    return Attempt.objects.select_related("job").get()


def log(job: Job, name: str = "0.0.log") -> Path:
    return rundir.path_of(job.directory) / "job" / "attempt-1" / "logs" / name


def texts(page: LogPage) -> list[str]:
    return [line.text for line in page.lines]


def test_lists_what_there_is(job: Job, attempt: Attempt) -> None:
    for name in ("0.1.log", "1.0.log", "0.0.log", "launcher.0.log", "launcher.1.log", "shipper.0.log", "0.0.log~"):
        log(job, name).write_text("x\n")
    log(job, "0.2.log").symlink_to("/etc/passwd")
    (rundir.path_of(job.directory) / "job" / "batch.1.log").write_text("x\n")
    found = [(entry.rank, entry.incarnation) for entry in available(attempt)]
    assert found == [(0, 0), (1, 0), (0, 1), (-1, 0), (-2, 0), (None, 0)]


def test_the_last_lines_and_those_before(job: Job, attempt: Attempt) -> None:
    log(job).write_text("".join(f"line {n}\n" for n in range(100)))
    page = read(job, LogSelection(attempt), limit=10)
    assert texts(page) == [f"line {n}" for n in range(90, 100)]
    assert page.more_before
    assert not page.more_after
    page = read(job, LogSelection(attempt), before=page.start, limit=85)
    assert texts(page)[0] == "line 5"
    page = read(job, LogSelection(attempt), before=page.start, limit=85)
    assert texts(page) == [f"line {n}" for n in range(5)]
    assert not page.more_before


def test_pages_forwards_meet_without_gap(job: Job, attempt: Attempt) -> None:
    lines = [f"line {n}" for n in range(100)]
    log(job).write_text("\n".join(lines) + "\n")
    found, cursor = [], 0
    while True:
        page = read(job, LogSelection(attempt), after=cursor, limit=7)
        if not page.lines:
            break
        found += texts(page)
        cursor = page.end
    assert found == lines


def test_following_waits_for_the_end_of_a_line(job: Job, attempt: Attempt) -> None:
    log(job).write_text("one\ntw")
    page = read(job, LogSelection(attempt), after=0)
    assert texts(page) == ["one"]
    with log(job).open("a") as file:
        file.write("o\n")
    assert texts(read(job, LogSelection(attempt), after=page.end)) == ["two"]
    with log(job).open("a") as file:
        file.write("torn")
    attempt.state = "failed"
    assert texts(read(job, LogSelection(attempt), after=page.end)) == ["two", "torn"]


def test_search_goes_on_where_it_stopped(job: Job, attempt: Attempt, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "PAGE_BYTES", 64)
    monkeypatch.setattr(logs, "SEARCH_BYTES", 256)
    log(job).write_text("".join(f"step {n} {'LOSS' if n % 10 == 0 else 'x'}\n" for n in range(100)))
    found, cursor = [], 0
    while True:
        page = read(job, LogSelection(attempt, search="loss"), after=cursor, limit=2)
        found += texts(page)
        if not page.more_after:
            break
        assert page.end > cursor
        cursor = page.end
    assert found == [f"step {n} LOSS" for n in range(0, 100, 10)]


def test_the_newest_incarnation_unless_another_is_chosen(job: Job, attempt: Attempt) -> None:
    log(job, "0.0.log").write_text("old\n")
    log(job, "2.0.log").write_text("new\n")
    assert texts(read(job, LogSelection(attempt))) == ["new"]
    assert texts(read(job, LogSelection(attempt, 0, 0))) == ["old"]


def test_bytes_that_are_no_text(job: Job, attempt: Attempt) -> None:
    log(job).write_bytes(b"\xff\xfe\x00 \x1b[31mred\x1b[0m\r\n" + b"y" * 100_000 + b"\nend\n")
    lines = texts(read(job, LogSelection(attempt)))
    assert lines[0].endswith("\x1b[31mred\x1b[0m")
    assert len(lines[1]) == logs.LINE_BYTES
    assert lines[2] == "end"


def test_a_huge_log_costs_little(job: Job, attempt: Attempt) -> None:
    log(job).write_text("first\n")
    os.truncate(log(job), 1 << 40)
    with log(job).open("r+b") as file:
        file.seek(0, os.SEEK_END)
        file.write(b"\nlast\n")
    assert texts(read(job, LogSelection(attempt), limit=1)) == ["last"]
    assert texts(read(job, LogSelection(attempt), after=0, limit=1)) == ["first"]
    page = read(job, LogSelection(attempt, search="last"))
    assert page.more_after
    assert page.end <= 2 * logs.SEARCH_BYTES


@pytest.mark.parametrize("plant", ["link", "fifo", "folder"])
def test_planted_things_are_errors(job: Job, attempt: Attempt, plant: str) -> None:
    if plant == "link":
        log(job).symlink_to("/etc/passwd")
    elif plant == "fifo":
        os.mkfifo(log(job))
    else:
        log(job).mkdir()
    with pytest.raises(LogError, match="cannot be read"):
        read(job, LogSelection(attempt, 0, 0))


def test_what_is_not_there(job: Job, attempt: Attempt) -> None:
    with pytest.raises(LogError, match="Rank 5 has not written a log in attempt 1 yet"):
        read(job, LogSelection(attempt, 5))
    with pytest.raises(LogError, match="launcher of node 3"):
        read(job, LogSelection(attempt, -4))
    with pytest.raises(LogError, match="batch script"):
        read(job, LogSelection(attempt, None))
    other = a_job(job.owner, job.project)
    with pytest.raises(LogError, match="no attempt"):
        read(other, LogSelection(attempt))
    assert other.latest is not None
    with pytest.raises(LogError, match="has not started"):
        read(other, LogSelection(other.latest))
