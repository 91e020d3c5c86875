"""Test cancelling, one step per tick; also while something else is being noticed or decided."""

from __future__ import annotations

import errno
from collections.abc import Callable
from datetime import timedelta
from unittest.mock import Mock

import pytest
from django.utils import timezone

from jobs.disk import rundir
from jobs.errors import Refused
from jobs.following import ending, follow
from jobs.following.decisions.policy import Decision
from jobs.models import Attempt, Job
from jobs.submitting.submit import cancel, kill
from portal.access import can
from portal.models import AuditEntry, User
from tests.jobs.following.launchers import newest
from tests.jobs.schedulers import ScriptedScheduler
from tests.lab import a_checkpoint, person, sysadmin

pytestmark = pytest.mark.django_db


def test_term_then_grace_then_kill(
    oskar: User, job: Job, scheduler: ScriptedScheduler, tick: Callable[[], bool]
) -> None:
    scheduler.update_job("101", state="running")
    tick()
    cancel(oskar, job)
    tick()
    tick()
    assert scheduler.signals == [("101", "USR1")]
    assert (rundir.path_of(newest().job.directory) / "portal" / "cancelled").exists()
    assert not scheduler.cancelled
    Attempt.objects.update(cancel_signalled_at=timezone.now() - timedelta(seconds=46))
    tick()
    tick()
    assert scheduler.cancelled == ["101"]
    scheduler.update_job("101", state="cancelled", signal=9)
    tick()
    attempt = newest()
    assert (attempt.state, attempt.reason) == ("cancelled", "Cancelled by oskar.")
    assert Attempt.objects.count() == 1


def test_a_full_disk_keeps_nobody_from_cancelling(
    oskar: User, job: Job, scheduler: ScriptedScheduler, tick: Callable[[], bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler.update_job("101", state="running")
    tick()
    cancel(oskar, job)
    monkeypatch.setattr(rundir, "write", Mock(side_effect=OSError(errno.ENOSPC, "No space left on device")))
    tick()
    assert scheduler.signals == [("101", "USR1")]


def test_a_job_that_stops_in_time_is_cancelled_too(
    oskar: User, job: Job, scheduler: ScriptedScheduler, tick: Callable[[], bool]
) -> None:
    scheduler.update_job("101", state="running")
    tick()
    cancel(oskar, job)
    tick()
    scheduler.update_job("101", state="failed", exit_code=75)
    tick()
    assert (newest().state, newest().exit_code) == ("cancelled", 75)
    assert "Resume continues" in newest().decision


def test_a_job_that_waits_leaves_the_queue(
    oskar: User, job: Job, scheduler: ScriptedScheduler, tick: Callable[[], bool]
) -> None:
    cancel(oskar, job)
    tick()
    assert scheduler.cancelled == ["101"]
    assert not scheduler.signals


def test_a_requeue_in_between_is_cancelled_too(
    oskar: User, job: Job, scheduler: ScriptedScheduler, tick: Callable[[], bool]
) -> None:
    scheduler.update_job("101", state="running")
    tick()
    cancel(oskar, job)
    scheduler.update_job("101", state="running", restart_count=1)
    tick()
    assert newest().number == 2
    assert scheduler.signals == [("101", "USR1")]


def test_requested_while_a_requeue_is_being_noticed(
    oskar: User, job: Job, scheduler: ScriptedScheduler, tick: Callable[[], bool]
) -> None:
    """The request arrives between the read of the rows and the scheduler's answer."""
    scheduler.update_job("101", state="running")
    tick()
    scheduler.update_job("101", state="running", restart_count=1)
    scheduler.meanwhile = lambda: cancel(oskar, job)
    tick()
    assert (newest().number, newest().cancel_asked_by) == (2, oskar)
    assert scheduler.signals == [("101", "USR1")]


def test_requested_while_the_restart_is_being_decided(
    oskar: User, job: Job, scheduler: ScriptedScheduler, tick: Callable[[], bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler.update_job("101", state="node_fail")
    decide = ending.decide

    def slowly(attempt: Attempt, cause: str) -> Decision:
        decision = decide(attempt, cause)
        if newest().cancel_asked_at is None:
            cancel(oskar, job)
        return decision

    monkeypatch.setattr(ending, "decide", slowly)
    tick()
    tick()
    assert Attempt.objects.count() == 1
    assert "Not restarted: it was cancelled." in newest().decision


def test_a_restart_that_was_due_is_off(
    oskar: User, job: Job, scheduler: ScriptedScheduler, tick: Callable[[], bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler.update_job("101", state="node_fail")
    with monkeypatch.context() as patch:
        patch.setattr(follow.Tick, "settle", lambda self: None)
        tick()
    cancel(oskar, job)
    tick()
    assert Attempt.objects.count() == 1
    assert "Not restarted: it was cancelled." in newest().decision


def test_no_report_makes_a_job_uncancellable(
    oskar: User, job: Job, scheduler: ScriptedScheduler, tick: Callable[[], bool]
) -> None:
    """Its launcher is stopped, its ranks ignore signals, and it claims that its last write took eleven days."""
    scheduler.update_job("101", state="running")
    tick()
    a_checkpoint(Job.objects.select_related("latest").get(), 100, seconds=1e6)
    Attempt.objects.update(started_at=timezone.now() - timedelta(days=30))
    cancel(oskar, job)
    tick()
    Attempt.objects.update(cancel_signalled_at=timezone.now() - timedelta(seconds=890))
    tick()
    assert not scheduler.cancelled, "within the site's limit it may be saving"
    Attempt.objects.update(cancel_signalled_at=timezone.now() - timedelta(seconds=916))
    tick()
    assert scheduler.cancelled == ["101"]


def test_a_second_cancel_kills(oskar: User, job: Job, scheduler: ScriptedScheduler, tick: Callable[[], bool]) -> None:
    scheduler.update_job("101", state="running")
    tick()
    assert not cancel(oskar, job)
    assert not cancel(oskar, job), "a double click"
    tick()
    assert scheduler.signals == [("101", "USR1")]
    Attempt.objects.update(cancel_asked_at=timezone.now() - timedelta(seconds=11))
    assert not cancel(oskar, job, may_kill=False)
    assert cancel(oskar, job)
    tick()
    tick()
    assert scheduler.cancelled == ["101"]
    scheduler.update_job("101", state="cancelled", signal=9)
    tick()
    assert (newest().state, newest().reason) == ("cancelled", "Killed by oskar.")
    assert Attempt.objects.count() == 1


def test_a_sysadmin_kills_at_once_and_it_is_audited(
    job: Job, scheduler: ScriptedScheduler, tick: Callable[[], bool]
) -> None:
    scheduler.update_job("101", state="running")
    tick()
    sam = sysadmin()
    kill(sam, job)
    kill(sam, job)
    tick()
    assert scheduler.cancelled == ["101"]
    assert not scheduler.signals, "no time to save"
    assert (rundir.path_of(newest().job.directory) / "portal" / "cancelled").exists(), "batch.sh requests no requeue"
    Attempt.objects.update(cancel_killed_at=timezone.now() - timedelta(seconds=11))
    tick()
    assert scheduler.cancelled == ["101", "101"], "as long as it lives"
    assert [(entry.user, entry.action) for entry in AuditEntry.objects.all()] == [(sam, "job.killed")]


def test_a_requeue_in_between_is_killed_too(
    oskar: User, job: Job, scheduler: ScriptedScheduler, tick: Callable[[], bool]
) -> None:
    scheduler.update_job("101", state="running")
    tick()
    kill(oskar, job)
    scheduler.update_job("101", state="running", restart_count=1)
    tick()
    assert (newest().number, newest().kill_requested_by) == (2, oskar)
    tick()
    assert "101" in scheduler.cancelled
    assert not scheduler.signals


def test_who_may_kill(oskar: User, job: Job) -> None:
    lead = person("lena", job.project, role="lead")
    assert can(oskar, "kill", job)
    assert can(lead, "kill", job)
    assert can(sysadmin(), "kill", job)
    member = person("mo", job.project)
    assert not can(member, "kill", job)
    with pytest.raises(Refused):
        kill(member, job)
    assert not Attempt.objects.exclude(kill_requested_at=None).exists()
