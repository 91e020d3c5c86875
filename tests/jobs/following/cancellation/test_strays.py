"""Test scheduler jobs whose attempts no longer want them: each is cancelled until it is gone."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import pytest
from django.utils import timezone

from jobs.following.submission import handover
from jobs.models import Attempt, Job, Stray
from jobs.submitting.submit import cancel, delete
from nodes.schedulers.base import JobStatus, SchedulerError, Submission
from portal.models import User
from tests.jobs.following.launchers import newest
from tests.jobs.schedulers import ScriptedScheduler
from tests.jobs.submissions import submit_spec

pytestmark = pytest.mark.django_db

SILENT = SchedulerError("no answer within 10 s")


@pytest.fixture
def job(oskar: User) -> Job:
    """Return a job that no scheduler has yet."""
    return submit_spec(oskar)[0]


def later(**ago: float) -> None:
    """Pretend that these rows were last changed so long ago."""
    moment = timezone.now() - timedelta(**ago)
    Attempt.objects.filter(ended_at=None).update(submitting_at=moment)
    Stray.objects.update(tried_at=moment)


def lost(oskar: User, job: Job, scheduler: ScriptedScheduler, tick: Callable[[], bool]) -> Submission:
    """Lose a request and its answer on the way to the scheduler, and cancel; return the submission."""
    scheduler.loses_answers = True
    tick()
    scheduler.loses_answers = False
    scheduler.jobs.clear()
    cancel(oskar, job)
    later(seconds=31)
    tick()
    assert (newest().state, newest().scheduler_id) == ("cancelled", "")
    return scheduler.submissions[0]


def test_a_submission_that_turns_up_after_its_cancel_is_cancelled(
    oskar: User, job: Job, scheduler: ScriptedScheduler, tick: Callable[[], bool]
) -> None:
    submission = lost(oskar, job, scheduler, tick)
    tick()
    assert not scheduler.cancelled
    scheduler.jobs["101"] = JobStatus(scheduler_id="101", state="running", key=submission.key)
    later(seconds=16)
    tick()
    assert scheduler.cancelled == ["101"]
    tick()
    assert scheduler.cancelled == ["101"]  # it has ten seconds to end
    scheduler.update_job("101", state="cancelled")
    tick()
    assert list(Stray.objects.values_list("scheduler_id", flat=True)) == [""]
    assert len(scheduler.submissions) == 1


def test_ten_minutes_are_enough(oskar: User, job: Job, scheduler: ScriptedScheduler, tick: Callable[[], bool]) -> None:
    lost(oskar, job, scheduler, tick)
    Stray.objects.update(since=timezone.now() - timedelta(minutes=9))
    later(seconds=16)
    tick()
    assert Stray.objects.count() == 1
    Stray.objects.update(since=timezone.now() - timedelta(minutes=11))
    later(seconds=16)
    tick()
    assert Stray.objects.count() == 0


def test_the_search_is_not_repeated_in_every_tick(
    oskar: User, job: Job, scheduler: ScriptedScheduler, tick: Callable[[], bool]
) -> None:
    lost(oskar, job, scheduler, tick)
    tick()
    scheduler.calls = 0
    for _ in range(3):
        tick()
    assert scheduler.calls == 0  # nodes were just read, nothing else is alive


def test_a_submission_refused_after_a_lost_answer_is_searched_for(
    job: Job, scheduler: ScriptedScheduler, tick: Callable[[], bool]
) -> None:
    scheduler.loses_answers = True
    tick()
    scheduler.loses_answers = False
    scheduler.jobs.clear()
    later(seconds=31)
    scheduler.refuses_submissions = SchedulerError("Its account is closed.", permanent=True)
    tick()
    assert newest().cause == "rejected"
    assert Stray.objects.get().key == newest().key


def test_a_cancel_that_fails_is_repeated_until_it_is_confirmed(
    oskar: User, job: Job, scheduler: ScriptedScheduler, tick: Callable[[], bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker wakes after its attempt was cancelled, and submits; just then the scheduler takes no cancel."""
    submit_now = scheduler.submit

    def slow(submission: Submission) -> str:
        later(seconds=40)
        cancel(oskar, job)
        handover.hand_over(newest().pk, scheduler)
        return submit_now(submission)

    monkeypatch.setattr(scheduler, "submit", slow)
    scheduler.refuses = lambda what, scheduler_id: SILENT
    handover.hand_over(newest().pk, scheduler)
    assert (newest().state, scheduler.cancelled) == ("cancelled", [])
    assert Stray.objects.get(scheduler_id="101").tried_at is None
    tick()
    assert scheduler.cancelled == []
    scheduler.refuses = None
    tick()
    assert scheduler.cancelled == ["101"]
    later(seconds=11)
    tick()
    assert scheduler.cancelled == ["101", "101"]  # it lives on
    scheduler.jobs.clear()
    tick()
    assert not Stray.objects.exclude(scheduler_id="").exists()


def test_a_scheduler_that_no_longer_knows_it_confirms(
    job: Job, scheduler: ScriptedScheduler, tick: Callable[[], bool]
) -> None:
    Stray.objects.create(key=newest().key, scheduler_id="77")
    scheduler.refuses = lambda what, scheduler_id: SchedulerError("Invalid job id specified", permanent=True)
    tick()
    assert Stray.objects.get().tried_at is not None
    tick()
    assert not Stray.objects.exists()


def test_anothers_job_of_the_same_id_is_left_alone(
    job: Job, scheduler: ScriptedScheduler, tick: Callable[[], bool]
) -> None:
    Stray.objects.create(key="0123456789abcdef", scheduler_id="77")
    scheduler.jobs["77"] = JobStatus(scheduler_id="77", state="running", key="anothers")
    tick()
    assert not scheduler.cancelled
    assert not Stray.objects.exists()


def test_it_outlives_its_job(oskar: User, job: Job, scheduler: ScriptedScheduler, tick: Callable[[], bool]) -> None:
    """Deleted or not, what still runs of it is to end."""
    submission = lost(oskar, job, scheduler, tick)
    tick()
    delete(oskar, Job.objects.get())
    scheduler.jobs["101"] = JobStatus(scheduler_id="101", state="running", key=submission.key)
    later(seconds=16)
    tick()
    assert scheduler.cancelled == ["101"]
