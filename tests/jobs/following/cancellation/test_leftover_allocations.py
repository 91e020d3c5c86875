"""Test a job that has ended while its allocation has not: its batch script was lost with its node."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from datetime import timedelta

import pytest
from django.utils import timezone

from jobs.models import Attempt, Job
from tests.jobs.following.launchers import launched, newest
from tests.jobs.schedulers import ScriptedScheduler

pytestmark = pytest.mark.django_db


@pytest.fixture
def running(job: Job, scheduler: ScriptedScheduler, tick: Callable[[], bool]) -> Attempt:
    scheduler.update_job("101", state="running", started_at=time.time() - 3600)
    tick()
    return newest()


def end(attempt: Attempt, *, ago: float, reported_ago: float | None = None, **result: object) -> None:
    """Write the launcher's final report `ago` seconds ago; its last report arrived `reported_ago` seconds ago."""
    path = launched(attempt, **result) / "result.json"
    os.utime(path, (time.time() - ago,) * 2)
    received = timezone.now() - timedelta(seconds=ago if reported_ago is None else reported_ago)
    Attempt.objects.filter(pk=attempt.pk).update(last_report_at=received)


@pytest.mark.parametrize(("cause", "code", "state"), [("completed", 0, "completed"), ("failed", 1, "failed")])
def test_its_nodes_are_given_back_and_the_launchers_word_counts(
    cause: str, code: int, state: str, running: Attempt, scheduler: ScriptedScheduler, tick: Callable[[], bool]
) -> None:
    end(running, ago=90, cause=cause, exit_code=code)
    tick()
    ended = Attempt.objects.get(pk=running.pk)
    assert (ended.state, ended.cause, ended.exit_code) == (state, cause, code)
    assert scheduler.cancelled == ["101"]


def test_stopped_with_a_checkpoint_it_goes_on(
    running: Attempt, scheduler: ScriptedScheduler, tick: Callable[[], bool]
) -> None:
    """No process was left to request a requeue from Slurm."""
    end(running, ago=90, cause="stopped", exit_code=75)
    tick()
    tick()
    ended = Attempt.objects.get(pk=running.pk)
    assert (ended.cause, ended.number, newest().number) == ("stopped", 1, 2)


@pytest.mark.parametrize(("ago", "reported_ago"), [(30, 30), (90, 5), (30, 600)])
def test_an_allocation_that_may_still_be_ending_is_left_alone(
    ago: float, reported_ago: float, running: Attempt, scheduler: ScriptedScheduler, tick: Callable[[], bool]
) -> None:
    end(running, ago=ago, reported_ago=reported_ago, cause="completed", exit_code=0)
    tick()
    assert (newest().state, scheduler.cancelled) == ("running", [])


def test_silence_alone_ends_nothing(running: Attempt, scheduler: ScriptedScheduler, tick: Callable[[], bool]) -> None:
    launched(running)
    Attempt.objects.update(last_report_at=timezone.now() - timedelta(hours=3))
    tick()
    assert (newest().state, scheduler.cancelled) == ("running", [])
