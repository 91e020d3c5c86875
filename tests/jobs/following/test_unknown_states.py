"""Test a scheduler that does not know a job's state: slurmctld has forgotten it and accounting is off."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import pytest
from django.utils import timezone

from jobs.models import Attempt, Job
from jobs.submitting.submit import cancel
from portal.models import User
from tests.jobs.following.launchers import launched, newest
from tests.jobs.schedulers import ScriptedScheduler

pytestmark = pytest.mark.django_db


@pytest.fixture
def untold(job: Job, scheduler: ScriptedScheduler, tick: Callable[[], bool]) -> Attempt:
    """Return a job that ran, and whose state is now unknown."""
    scheduler.update_job("101", state="running")
    tick()
    scheduler.update_job("101", state="unknown")
    tick()
    return newest()


def long_since(minutes: int = 11) -> None:
    Attempt.objects.update(untold_since=timezone.now() - timedelta(minutes=minutes))


@pytest.mark.parametrize(("cause", "code", "state"), [("completed", 0, "completed"), ("failed", 1, "failed")])
def test_the_launchers_last_word_counts_after_a_while(
    cause: str, code: int, state: str, untold: Attempt, scheduler: ScriptedScheduler, tick: Callable[[], bool]
) -> None:
    launched(untold, cause=cause, exit_code=code)
    long_since(9)
    tick()
    assert newest().ended_at is None
    long_since()
    tick()
    assert (newest().state, newest().cause, newest().exit_code) == (state, cause, code)


def test_without_a_last_word_it_stays_and_explains_it(
    untold: Attempt, scheduler: ScriptedScheduler, tick: Callable[[], bool]
) -> None:
    launched(untold)
    long_since()
    tick()
    attempt = newest()
    assert (attempt.state, attempt.ended_at) == ("running", None)
    assert attempt.reason.startswith("The scheduler has not known its state since 20")
    version = attempt.version
    tick()
    assert newest().version == version
    scheduler.update_job("101", state="running")
    tick()
    assert (newest().state, newest().reason, newest().untold_since) == ("running", "", None)


def test_a_single_such_answer_means_nothing(
    untold: Attempt, scheduler: ScriptedScheduler, tick: Callable[[], bool]
) -> None:
    assert untold.untold_since is not None
    assert untold.state == "running"
    since = untold.untold_since
    tick()
    assert newest().untold_since == since
    scheduler.update_job("101", state="running")
    tick()
    assert newest().untold_since is None
    assert not scheduler.cancelled


def test_a_job_that_was_cancelled_is_cancelled(
    oskar: User, job: Job, untold: Attempt, scheduler: ScriptedScheduler, tick: Callable[[], bool]
) -> None:
    launched(untold, cause="stopped", exit_code=75)
    cancel(oskar, job)
    long_since()
    tick()
    assert (newest().state, Attempt.objects.count()) == ("cancelled", 1)


def test_a_job_that_was_killed_is_gone_without_a_last_word(
    oskar: User, job: Job, untold: Attempt, scheduler: ScriptedScheduler, tick: Callable[[], bool]
) -> None:
    """Otherwise nobody could ever resume or delete a job of which the accounts missed the end."""
    launched(untold)
    cancel(oskar, job)
    long_since()
    tick()
    assert newest().ended_at is None
    Attempt.objects.update(cancel_signalled_at=timezone.now() - timedelta(minutes=5))
    tick()
    tick()
    assert scheduler.cancelled == ["101"]
    assert (newest().state, newest().cause, Attempt.objects.count()) == ("cancelled", "cancelled", 1)


def test_not_knowing_is_not_missing(untold: Attempt, scheduler: ScriptedScheduler, tick: Callable[[], bool]) -> None:
    """However long its state was unknown, an answer without the job counts separately."""
    long_since(60)
    status = scheduler.jobs.pop("101")
    tick()
    assert newest().ended_at is None
    assert newest().unknown_since is not None
    scheduler.jobs["101"] = status
    tick()
    assert (newest().ended_at, newest().unknown_since) == (None, None)


def test_thousands_are_noted_in_a_few_queries(job: Job, scheduler: ScriptedScheduler, tick: Callable[[], bool]) -> None:
    more = [Attempt(job=job, number=n, scheduler_id=str(1000 + n), token_digest="x") for n in range(2, 1_000)]
    Attempt.objects.bulk_create(more)
    for attempt in Attempt.objects.all():
        scheduler.jobs[attempt.scheduler_id] = scheduler.jobs["101"].__class__(
            scheduler_id=attempt.scheduler_id, state="unknown", key=attempt.key
        )
    tick()
    assert Attempt.objects.filter(untold_since=None).count() == 0
