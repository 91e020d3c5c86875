"""Test what a follower tolerates: a silent scheduler, damaged results, broken directories, slow spools."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from django.utils import timezone

from jobs.disk import rundir
from jobs.following import follow
from jobs.models import Attempt, Job, Stream
from jobs.spec import JobSpec, write_toml
from jobs.submitting.submit import cancel, submit
from nodes.schedulers.base import SchedulerError
from portal.models import User
from tests.jobs.following.launchers import launched, newest
from tests.jobs.schedulers import ScriptedScheduler

pytestmark = pytest.mark.django_db


def test_a_scheduler_that_does_not_answer_changes_nothing(
    job: Job, scheduler: ScriptedScheduler, tick: Callable[[], bool]
) -> None:
    before = Attempt.objects.values().get()
    scheduler.broken = SchedulerError("no answer within 10 s")
    assert tick()
    assert Attempt.objects.values().get() == before


def test_a_job_unknown_to_the_scheduler_is_lost_after_a_while(
    job: Job, scheduler: ScriptedScheduler, tick: Callable[[], bool]
) -> None:
    scheduler.jobs.clear()
    tick()
    assert newest().state == "pending"
    Attempt.objects.update(unknown_since=timezone.now() - timedelta(minutes=2))
    tick()
    first = Attempt.objects.get(number=1)
    assert (first.state, first.cause) == ("failed", "forgotten")
    assert first.reason == "The scheduler no longer knows its job 101."
    assert first.decision.startswith("The scheduler no longer knows the job. Restarted")
    assert scheduler.cancelled == ["101"]  # should it still run unnoticed: no second job alongside it


@pytest.mark.parametrize(
    ("cause", "is_cancelled", "state", "attempts"),
    [("completed", False, "completed", 1), ("stopped", False, "failed", 2), ("stopped", True, "cancelled", 1)],
)
def test_a_job_that_the_scheduler_has_forgotten_may_have_ended_well(
    cause: str,
    is_cancelled: bool,
    state: str,
    attempts: int,
    oskar: User,
    job: Job,
    scheduler: ScriptedScheduler,
    tick: Callable[[], bool],
) -> None:
    """Slurm forgets ended jobs within minutes: then the launcher's final report and a person's cancel count."""
    scheduler.update_job("101", state="running")
    tick()
    launched(newest(), cause=cause, exit_code=0 if cause == "completed" else 75)
    scheduler.jobs.clear()
    if is_cancelled:
        cancel(oskar, job)
    Attempt.objects.update(unknown_since=timezone.now() - timedelta(minutes=2))
    tick()
    first = Attempt.objects.get(number=1)
    assert (first.state, first.cause) == (state, "cancelled" if is_cancelled else cause)
    assert Attempt.objects.count() == attempts


def test_another_job_of_the_same_id_is_neither_followed_nor_cancelled(
    oskar: User, job: Job, scheduler: ScriptedScheduler, tick: Callable[[], bool]
) -> None:
    """After a restore on another machine the scheduler counts from 1 again."""
    scheduler.update_job("101", state="running", key="anothers")
    cancel(oskar, job)
    tick()
    first = Attempt.objects.get(number=1)
    assert (first.state, first.nodes) == ("cancelled", [])
    assert (scheduler.signals, scheduler.cancelled) == ([], [])


def test_another_job_of_the_same_id_does_not_hold_up_the_next_attempt(
    job: Job, scheduler: ScriptedScheduler, tick: Callable[[], bool]
) -> None:
    scheduler.update_job("101", state="running", key="anothers")
    tick()
    first, second = Attempt.objects.order_by("number")
    assert (first.state, first.reason) == ("failed", "The scheduler's job 101 is another one: its job ids were reset.")
    assert second.scheduler_id == "102"


def test_a_single_answer_without_a_job_means_nothing(
    job: Job, scheduler: ScriptedScheduler, tick: Callable[[], bool]
) -> None:
    """This holds however long it has been running, and however often that happens."""
    scheduler.update_job("101", state="running")
    Attempt.objects.update(submitted_at=timezone.now() - timedelta(hours=3))
    for _ in range(2):
        status = scheduler.jobs.pop("101")
        tick()
        assert newest().unknown_since is not None
        scheduler.jobs["101"] = status
        tick()
        assert (newest().number, newest().state, newest().unknown_since) == (1, "running", None)
    assert not scheduler.cancelled


def test_what_a_job_wrote_is_not_believed(job: Job, scheduler: ScriptedScheduler, tick: Callable[[], bool]) -> None:
    folder = launched(newest())
    (folder / "result.json").symlink_to("/etc/passwd")
    (folder.parent / "attempt-2").symlink_to(folder)
    scheduler.update_job("101", state="failed", exit_code=1)
    tick()
    assert (newest().cause, newest().failure, newest().directory) == ("failed", {}, "attempt-1")


def test_odd_results(job: Job, scheduler: ScriptedScheduler, tick: Callable[[], bool]) -> None:
    failure = {"rank": "x", "kind": ["exception"], "error": "a\0b" * 5000, "exit_code": 10**30}
    launched(newest(), exit_code=1, first_failure=failure)
    scheduler.update_job("101", state="failed", exit_code=1)
    tick()
    assert newest().cause == "failed"
    assert set(newest().failure) == {"error"}
    assert len(newest().failure["error"]) == 2000


def test_half_a_character_in_a_result_does_not_keep_it_running(
    job: Job, scheduler: ScriptedScheduler, tick: Callable[[], bool]
) -> None:
    """Python writes undecodable file names into JSON as surrogates, which databases refuse."""
    launched(newest(), exit_code=1, first_failure={"rank": 0, "kind": "ex\udc80", "error": "no /data/\udcff"})
    scheduler.update_job("101", state="failed", exit_code=1)
    tick()
    assert (newest().state, newest().reason) == ("failed", "Rank 0: no /data/\ufffd")


def test_a_stranger_s_job_of_the_same_id_is_not_followed(
    oskar: User, job: Job, scheduler: ScriptedScheduler, tick: Callable[[], bool]
) -> None:
    """Slurm has forgotten its last job, and given the id to a job without a key, which Vigil did not submit."""
    Attempt.objects.update(scheduler_user="oskar")
    User.objects.filter(pk=oskar.pk).update(slurm_user="oskar")
    scheduler.update_job("101", key="", user="oskar")  # renamed
    tick()
    assert newest().number == 1
    scheduler.update_job("101", key="", user="mallory")
    tick()
    first, second = Attempt.objects.order_by("number")
    assert (first.state, first.reason) == ("failed", "The scheduler's job 101 is another one: its job ids were reset.")
    assert (second.scheduler_id, scheduler.cancelled) == ("102", [])


def test_a_job_submitted_without_vigil_under_the_same_id_is_not_followed(
    oskar: User, job: Job, scheduler: ScriptedScheduler, tick: Callable[[], bool]
) -> None:
    """Slurm counts from 1 again, and the person's `sbatch` gets the id of one of their jobs in Vigil."""
    Attempt.objects.update(scheduler_user="oskar")
    User.objects.filter(pk=oskar.pk).update(slurm_user="oskar")
    now = time.time()
    scheduler.update_job("101", key="", user="oskar", submitted_at=now + 300)  # Slurm's clock may be ahead
    tick()
    scheduler.update_job("101", submitted_at=now + 7200, restart_count=1)  # a requeue is reported as a submission
    tick()
    assert list(Attempt.objects.values_list("scheduler_id", flat=True)) == ["101", "101"]
    scheduler.update_job("101", submitted_at=now - 7200, restart_count=0)
    tick()
    assert [(attempt.state, attempt.scheduler_id) for attempt in Attempt.objects.order_by("number")][1:] == [
        ("failed", "101"),
        ("pending", "102"),
    ]
    scheduler.update_job("102", key="", user="oskar", submitted_at=now + 7200)
    tick()
    last = newest()
    assert (last.number, last.reason) == (3, "The scheduler's job 102 is another one: its job ids were reset.")
    assert not scheduler.cancelled


def test_who_copies_a_key_into_a_comment_loses_no_job(
    job: Job, scheduler: ScriptedScheduler, tick: Callable[[], bool]
) -> None:
    """The job of that name still runs, whoever owns the other one."""
    for first, second in (("anothers", newest().key), (newest().key, "anothers")):
        scheduler.update_job("101", state="running", key=first, other_key=second)
        tick()
        assert (newest().number, newest().state) == (1, "running")


def test_it_stays_open_while_a_stream_has_not_ended(
    job: Job, scheduler: ScriptedScheduler, tick: Callable[[], bool]
) -> None:
    folder = launched(newest())
    (folder / "spool" / "0.0.abcdef0123456789.jsonl").write_text("")
    scheduler.update_job("101", state="completed", exit_code=0)
    tick()
    assert newest().closed_at is None
    stream = Stream.objects.create(attempt=newest(), uid="abcdef0123456789", incarnation=0, rank=0)
    tick()
    assert newest().closed_at is None
    Stream.objects.filter(pk=stream.pk).update(ended=True)
    tick()
    assert newest().closed_at is not None


def test_ten_minutes_without_growth_close_it(job: Job, scheduler: ScriptedScheduler, tick: Callable[[], bool]) -> None:
    (launched(newest()) / "spool" / "0.0.abcdef0123456789.jsonl").write_text("")
    scheduler.update_job("101", state="completed", exit_code=0)
    tick()
    Attempt.objects.update(ended_at=timezone.now() - timedelta(minutes=11), last_report_at=timezone.now())
    tick()
    assert newest().closed_at is None  # it grew a moment ago
    Attempt.objects.update(last_report_at=timezone.now() - timedelta(minutes=11))
    tick()
    assert newest().closed_at is not None


def test_a_broken_run_directory_affects_no_other_job(
    oskar: User, job: Job, scheduler: ScriptedScheduler, caplog: pytest.LogCaptureFixture
) -> None:
    """The other jobs still get their tokens and folders."""
    spec = JobSpec.parse({"name": "other"})
    other, _ = submit(oskar, spec, spec_toml=write_toml(spec))
    follow.tick(scheduler)
    for scheduler_id in ("101", "102"):
        scheduler.update_job(scheduler_id, state="running")
    Attempt.objects.update(token_digest="")
    job.refresh_from_db()
    shutil.rmtree(rundir.path_of(job.directory))
    launched(Attempt.objects.select_related("job").get(job=other))
    follow.tick(scheduler)
    assert other.attempts.get().token_digest
    assert other.attempts.get().directory == "attempt-1"
    assert not job.attempts.get().token_digest
    assert "FileNotFoundError" in caplog.text
    caplog.clear()  # the expected error


def test_spools_that_take_long_hold_up_nobody(
    oskar: User, job: Job, scheduler: ScriptedScheduler, tick: Callable[[], bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It delays no other job's submission, and not for ever what follows; it is not closed before they are read."""
    launched(newest())
    scheduler.update_job("101", state="node_fail")
    spec = JobSpec.parse({"name": "other"})
    other, _ = submit(oskar, spec, spec_toml=write_toml(spec))
    monkeypatch.setattr(follow, "COLLECT_S", 0.0)
    tick()
    assert other.attempts.get().scheduler_id == "102"
    first = job.attempts.get()
    assert (first.state, first.decided_at, first.collected_at) == ("node_fail", None, None)
    Attempt.objects.filter(pk=first.pk).update(collecting_since=timezone.now() - timedelta(seconds=21))
    tick()
    first, second = job.attempts.order_by("number")
    assert (second.origin, second.scheduler_id) == ("restarted", "103")
    Attempt.objects.filter(pk=first.pk).update(ended_at=timezone.now() - timedelta(minutes=11))
    tick()
    first.refresh_from_db()
    assert first.closed_at is None
    monkeypatch.setattr(follow, "COLLECT_S", 1.0)
    tick()
    first.refresh_from_db()
    assert first.closed_at is not None


def test_a_file_system_that_is_away_closes_nothing(
    job: Job, scheduler: ScriptedScheduler, tick: Callable[[], bool], settings: Any, tmp_path: Path
) -> None:
    """The spools are ingested once it is back; an attempt with a removed folder does close."""
    launched(newest())
    there, settings.VIGIL_RUNS = settings.VIGIL_RUNS, tmp_path / "unmounted"
    scheduler.update_job("101", state="completed", exit_code=0)
    tick()
    Attempt.objects.update(ended_at=timezone.now() - timedelta(minutes=11))
    tick()
    assert (newest().state, newest().collected_at, newest().closed_at) == ("completed", None, None)
    settings.VIGIL_RUNS = there
    tick()
    assert newest().collected_at is not None
    assert newest().closed_at is not None
    settings.VIGIL_RUNS = tmp_path / "unmounted"
    Attempt.objects.update(ended_at=timezone.now() - timedelta(days=2), collected_at=None, closed_at=None)
    tick()
    assert newest().closed_at is not None
