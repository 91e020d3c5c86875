"""Test Slurm's accounting of an attempt's steps: requested after its end, stored, and shown."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta

import pytest
from django.utils import timezone

from jobs.following import slurm_steps
from jobs.models import Attempt, Job
from nodes.schedulers.base import SchedulerError, SlurmStep
from portal.models import User
from tests.jobs.following.launchers import newest
from tests.jobs.pages.reading import text
from tests.jobs.schedulers import ScriptedScheduler
from tests.lab import bearer, signed_in

pytestmark = pytest.mark.django_db

BATCH = SlurmStep(number="batch", name="batch", state="failed", exit_code=1, nodes=("dgx-01",), started_at=1.0)
KILLED = SlurmStep(number="0", name="python", state="failed", signal=9, nodes=("dgx-01", "dgx-02"), started_at=2.0)
FINE = SlurmStep(number="extern", name="extern", state="completed", exit_code=0, started_at=1.0)


@pytest.fixture
def failed(job: Job, scheduler: ScriptedScheduler, tick: Callable[[], bool]) -> Attempt:
    """Return an attempt that has ended and is not in the accounts yet."""
    scheduler.update_job("101", state="failed", exit_code=1)
    tick()
    return newest()


def stored_steps(attempt: Attempt) -> tuple[list[str], bool]:
    """Return the states of the stored steps, and whether Vigil still waits for them."""
    attempt.refresh_from_db()
    return [step["state"] for step in attempt.slurm_steps], attempt.slurm_steps_at is None


def test_they_are_waited_for_and_stored_whole(
    failed: Attempt, scheduler: ScriptedScheduler, tick: Callable[[], bool]
) -> None:
    assert stored_steps(failed) == ([], True)
    running = SlurmStep(number="0", name="python", state="running")
    scheduler.stepped["101", 0] = (BATCH, running)
    tick()
    assert stored_steps(failed) == ([], True)
    scheduler.stepped["101", 0] = (BATCH, KILLED)
    tick()
    assert stored_steps(failed) == (["failed", "failed"], False)
    version = failed.version
    scheduler.stepped.clear()
    tick()
    failed.refresh_from_db()
    assert (len(failed.slurm_steps), failed.version) == (2, version)


def test_who_cancelled_it_past_vigil_is_named(
    job: Job, scheduler: ScriptedScheduler, tick: Callable[[], bool], mira: User
) -> None:
    scheduler.update_job("101", state="cancelled")
    tick()
    cancelled = newest()
    assert cancelled.reason == "Cancelled outside Vigil, as by scancel."
    scheduler.stepped["101", 0], scheduler.cancellers["101"] = (FINE,), "ada"
    tick()
    cancelled.refresh_from_db()
    assert cancelled.reason == "Cancelled by Slurm user ada, outside Vigil."
    assert "Cancelled by Slurm user ada, outside Vigil." in text(signed_in(mira).get(f"/jobs/{job.pk}"))


def test_the_accounts_are_not_queried_for_jobs_that_vigil_cancelled(
    job: Job, scheduler: ScriptedScheduler, tick: Callable[[], bool]
) -> None:
    Attempt.objects.update(cancel_asked_at=timezone.now())
    scheduler.update_job("101", state="cancelled")
    scheduler.stepped["101", 0], scheduler.cancellers["101"] = (FINE,), "vigil"
    tick()
    tick()
    assert newest().reason == "Cancelled."
    assert "cancelled_by" not in scheduler.requests


def test_two_minutes_are_enough(failed: Attempt, scheduler: ScriptedScheduler, tick: Callable[[], bool]) -> None:
    """Then Vigil stores what is there."""
    scheduler.stepped["101", 0] = (FINE, SlurmStep(number="0", name="python", state="running"))
    Attempt.objects.update(ended_at=timezone.now() - timedelta(seconds=121))
    tick()
    assert stored_steps(failed) == (["completed", "running"], False)


def test_accounts_that_do_not_answer_are_queried_again(
    failed: Attempt, scheduler: ScriptedScheduler, tick: Callable[[], bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slurm_steps, "_silent_until", 0.0)
    scheduler.broken_parts["steps"] = SchedulerError("slurmdbd is away")
    Attempt.objects.update(ended_at=timezone.now() - timedelta(minutes=5))
    tick()
    assert stored_steps(failed) == ([], True)
    scheduler.requests.clear()
    tick()
    assert "steps" not in scheduler.requests  # not in every tick: each such call may take ten seconds
    del scheduler.broken_parts["steps"]
    scheduler.stepped["101", 0] = (BATCH,)
    monkeypatch.setattr(slurm_steps, "_silent_until", 0.0)
    tick()
    assert stored_steps(failed) == (["failed"], False)


def test_each_run_has_separate_steps(job: Job, scheduler: ScriptedScheduler, tick: Callable[[], bool]) -> None:
    scheduler.update_job("101", state="running", restart_count=1)
    scheduler.stepped = {("101", 0): (KILLED,), ("101", 1): (FINE,)}
    tick()
    scheduler.update_job("101", state="completed", exit_code=0)
    tick()
    stored = [[step["number"] for step in attempt.slurm_steps] for attempt in Attempt.objects.order_by("number")]
    assert stored == [["0"], ["extern"]]


def test_a_script_with_many_keeps_what_went_wrong() -> None:
    many = [SlurmStep(number=str(n), name="srun", state="completed", started_at=float(n)) for n in range(500)]
    many[450] = SlurmStep(number="450", name="srun", state="failed", exit_code=3, started_at=450.0)
    stored = slurm_steps.as_rows(many)
    assert len(stored) == slurm_steps.MAX_STEPS
    assert stored[-1]["number"] == "450"


def test_rest_and_the_page_show_them(
    oskar: User, failed: Attempt, scheduler: ScriptedScheduler, tick: Callable[[], bool]
) -> None:
    scheduler.stepped["101", 0] = (FINE, KILLED, BATCH)
    tick()
    (attempt,) = bearer(oskar).get(f"/api/v1/jobs/{failed.job_id}/attempts").json()["items"]
    assert [step["number"] for step in attempt["slurm_steps"]] == ["extern", "0", "batch"]
    assert attempt["slurm_steps"][1] == {
        "number": "0", "name": "python", "state": "failed", "exit_code": None, "signal": 9,
        "nodes": ["dgx-01", "dgx-02"], "started_at": 2.0, "ended_at": None,
    }  # fmt: skip
    page = text(signed_in(oskar).get(f"/jobs/{failed.job_id}/attempts"))
    assert "3 Slurm steps: step 0 (python) failed, no exit code, SIGKILL, on dgx-01, dgx-02, and 1 more" in page
    assert "the batch script failed, exit 1, on dgx-01" in page


def test_a_stop_to_be_resumed_is_no_failure(
    oskar: User, failed: Attempt, scheduler: ScriptedScheduler, tick: Callable[[], bool]
) -> None:
    launcher = SlurmStep(number="0", name="python", state="failed", exit_code=75, started_at=2.0)
    scheduler.stepped["101", 0] = (FINE, launcher, replace(BATCH, exit_code=75))
    tick()
    page = text(signed_in(oskar).get(f"/jobs/{failed.job_id}/attempts"))
    assert "<summary>3 Slurm steps, stopped to be resumed</summary>" in page
    assert "<li>the batch script stopped to be resumed, exit 75, on dgx-01</li>" in page
    Attempt.objects.update(slurm_steps=[*slurm_steps.as_rows([launcher, KILLED])])
    page = text(signed_in(oskar).get(f"/jobs/{failed.job_id}/attempts"))
    assert "2 Slurm steps: step 0 (python) failed, no exit code, SIGKILL" in page
    assert "step 0 (python) stopped to be resumed, exit 75" in page
    Job.objects.update(kind=Job.ATTACHED)
    assert "step 0 (python) failed, exit 75" in text(signed_in(oskar).get(f"/jobs/{failed.job_id}/attempts"))
