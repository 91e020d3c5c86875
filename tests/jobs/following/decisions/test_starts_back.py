"""Test where an attempt starts that Vigil rolled back: not from the newest checkpoint."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib import import_module

import pytest
from django.apps import apps

from jobs.disk import rundir
from jobs.models import Attempt, Checkpoint, Job
from jobs.spec import JobSpec, write_toml
from jobs.submitting.submit import submit
from portal.models import User
from tests.jobs.following.launchers import EXCEPTION, die, launched, machines, newest, verdict
from tests.jobs.schedulers import ScriptedScheduler
from tests.lab import a_checkpoint

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("_verdicts_are_waited_for")]
Tick = Callable[[], bool]


@pytest.fixture
def job(job_of_two_nodes: Job) -> Job:
    return job_of_two_nodes


def test_a_broken_checkpoint_is_gone_back_behind(job: Job, scheduler: ScriptedScheduler, tick: Tick) -> None:
    a_checkpoint(job, 20, attempt=newest())
    a_checkpoint(job, 40, parent_step=20, parent_generation=1, attempt=newest())
    die(scheduler, tick, "storage.io")
    assert newest().resume_from == Checkpoint.objects.get(step=40)
    second = die(scheduler, tick, "checkpoint.corrupt")
    assert "Restarted from step 20 as attempt 3" in second.decision
    hint = json.loads((rundir.path_of(Job.objects.get().directory) / "portal" / "attempt.json").read_text())
    assert hint == {"number": 3, "resume": "step-20"}, "its launchers would find the newest"


@pytest.mark.parametrize("cause", ["scheduler.launch", "scheduler.node_fail"])
def test_where_it_was_to_start_is_stored_until_it_has(
    job: Job, scheduler: ScriptedScheduler, tick: Tick, cause: str
) -> None:
    """Its launchers, which never ran, would have started its line."""
    a_checkpoint(job, 20, attempt=newest())
    a_checkpoint(job, 40, parent_step=20, parent_generation=1, attempt=newest())
    die(scheduler, tick, "checkpoint.corrupt")
    assert (newest().resume_from.step, newest().starts_back) == (20, True)
    die(scheduler, tick, cause)
    assert (newest().number, newest().resume_from.step, newest().starts_back) == (3, 20, True)
    a_checkpoint(job, 60, attempt=newest(), generation=2, parent_step=20, parent_generation=1)
    die(scheduler, tick, "storage.io")
    assert (newest().resume_from.step, newest().starts_back) == (60, False), "it has a line of its own"


def test_requeued_by_slurm_it_starts_where_it_was_to(job: Job, scheduler: ScriptedScheduler, tick: Tick) -> None:
    a_checkpoint(job, 20, attempt=newest())
    a_checkpoint(job, 40, parent_step=20, parent_generation=1, attempt=newest())
    die(scheduler, tick, "checkpoint.corrupt", nodes=("dgx01", "dgx02"))
    scheduler.update_job("102", state="running", nodes=("dgx03", "dgx04"))
    tick()
    scheduler.update_job("102", state="pending", restart_count=1)
    tick()
    tick()
    assert (newest().origin, newest().starts_back, newest().excluded_nodes) == ("requeued", True, [])
    hint = json.loads((rundir.path_of(Job.objects.get().directory) / "portal" / "attempt.json").read_text())
    assert hint == {"number": 3, "resume": "step-20"}


class TestBeforeABrokenCheckpoint:
    def test_is_the_checkpoint_before_its_newest(self, job: Job, scheduler: ScriptedScheduler, tick: Tick) -> None:
        """It had continued from 20 and saved 40 and 60: the one that it could not read is 60."""
        a_checkpoint(job, 20, attempt=newest())
        die(scheduler, tick, "storage.io")
        a_checkpoint(job, 40, generation=2, parent_step=20, parent_generation=1, attempt=newest())
        a_checkpoint(job, 60, generation=2, parent_step=40, parent_generation=2, attempt=newest())
        assert "Restarted from step 40" in die(scheduler, tick, "checkpoint.corrupt").decision

    def test_is_what_is_left_where_it_was_found_out_already(
        self, job: Job, scheduler: ScriptedScheduler, tick: Tick
    ) -> None:
        a_checkpoint(job, 20, attempt=newest())
        a_checkpoint(job, 40, parent_step=20, parent_generation=1, attempt=newest(), state=Checkpoint.State.CORRUPT)
        assert "Restarted from step 20" in die(scheduler, tick, "checkpoint.corrupt").decision


def test_an_ordinary_restart_keeps_the_learning_rate(oskar: User, scheduler: ScriptedScheduler, tick: Tick) -> None:
    """`restart` in place of `rewind` is taken literally."""
    machines(scheduler, "dgx01", "dgx02", "dgx03")
    spec = JobSpec.parse({"name": "gpt", "restart": {"on": {"numerics.divergence": "restart"}}})
    submit(oskar, spec, spec_toml=write_toml(spec))
    tick()
    scheduler.update_job("101", state="running", nodes=("dgx01",))
    tick()
    error = "NumericsError: numerics.divergence: at step 500 the smoothed loss is 9"
    launched(newest(), exit_code=1, cause="failed", first_failure={**EXCEPTION, "error": error})
    scheduler.update_job("101", state="failed", exit_code=1)
    tick()
    verdict(Attempt.objects.get(number=1), "numerics.divergence")
    tick()
    assert (newest().number, newest().rewinds) == (2, 0)


@pytest.mark.parametrize(
    ("cause", "origin", "is_back"),
    [
        ("diverged", "restarted", True),
        ("corruption", "restarted", True),
        ("diverged", "resumed", False),
        ("node_fail", "restarted", False),
    ],
)
def test_those_of_before_an_update_do_so_too(job: Job, cause: str, origin: str, is_back: bool) -> None:
    """Before the update, only the end of the last attempt recorded it."""
    start = a_checkpoint(job, 20, attempt=newest())
    Attempt.objects.update(cause=cause)
    Attempt.objects.create(job=job, number=2, origin=origin, resume_from=start)
    import_module("jobs.migrations.0011_before_incidents").say_which_start_back(apps, None)
    assert [attempt.starts_back for attempt in Attempt.objects.order_by("number")] == [False, is_back]
