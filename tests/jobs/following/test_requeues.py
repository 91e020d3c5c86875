"""Test requeues of the scheduler, by hand or after a preemption: each becomes an attempt with its own row."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from jobs.disk import rundir
from jobs.following.poll import MAX_REQUEUES
from jobs.models import Attempt, Job
from tests.jobs.following.launchers import launched, newest
from tests.jobs.schedulers import ScriptedScheduler

pytestmark = pytest.mark.django_db


def test_a_requeue_is_a_new_attempt(job: Job, scheduler: ScriptedScheduler, tick: Callable[[], bool]) -> None:
    scheduler.update_job("101", state="running")
    launched(newest(), exit_code=75, cause="stopped", first_failure=None)
    tick()
    scheduler.update_job("101", state="pending", restart_count=1)
    tick()
    first, second = Attempt.objects.order_by("number")
    assert (first.state, first.cause) == ("requeued", "stopped")
    assert (second.origin, second.scheduler_id, second.scheduler_restart_count) == ("requeued", "101", 1)
    assert len(scheduler.submissions) == 1
    root = rundir.path_of(second.job.directory)
    token = json.loads((root / "portal" / "token").read_text())
    assert (token["attempt"], token["restart_count"], token["number"]) == (second.pk, 1, 2)
    launched(second)
    scheduler.update_job("101", state="completed", restart_count=1, exit_code=0)
    tick()
    second.refresh_from_db()
    assert (second.state, second.directory) == ("completed", "attempt-2")


@pytest.mark.parametrize(("before", "why"), [("", "by a person or by the scheduler"), ("preempted", "to another job")])
def test_a_requeue_by_hand_is_no_preemption(
    job: Job, scheduler: ScriptedScheduler, tick: Callable[[], bool], before: str, why: str
) -> None:
    scheduler.update_job("101", state="running")
    tick()
    scheduler.update_job("101", state="pending", restart_count=1, previous_end=before)
    tick()
    first = Attempt.objects.order_by("number")[0]
    assert (first.state, first.cause) == (before or "requeued", before or "requeued")
    assert why in first.reason
    assert first.decision == "Requeued; continues as attempt 2.", "whoever requested it"


def test_requeues_that_no_tick_saw_get_their_rows(
    job: Job, scheduler: ScriptedScheduler, tick: Callable[[], bool]
) -> None:
    scheduler.update_job("101", state="completed", restart_count=3, exit_code=0)
    tick()
    states = [(attempt.state, attempt.scheduler_restart_count) for attempt in Attempt.objects.order_by("number")]
    assert states == [("requeued", 0), ("requeued", 1), ("requeued", 2), ("completed", 3)]


def test_of_many_requeues_only_so_many_are_stored_in_a_tick(
    job: Job, scheduler: ScriptedScheduler, tick: Callable[[], bool]
) -> None:
    scheduler.update_job("101", state="running", restart_count=MAX_REQUEUES + 2)
    attempts = Attempt.objects.order_by("number")
    for requeued, newest_state in ((MAX_REQUEUES, "pending"), (MAX_REQUEUES + 2, "running")):
        tick()
        assert [attempt.state for attempt in attempts.all()] == ["requeued"] * requeued + [newest_state]
