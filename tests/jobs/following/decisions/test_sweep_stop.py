"""Test that a sweep stops if its first jobs fail for the same reason."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from jobs.models import Attempt, Sweep
from jobs.spec.sweep import SweepSpec
from jobs.submitting import sweeps
from portal.models import User
from tests.jobs.following.launchers import verdict
from tests.jobs.schedulers import ScriptedScheduler
from tests.lab import bearer, signed_in

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("_verdicts_are_waited_for")]
Tick = Callable[[], bool]


@pytest.fixture
def sweep(oskar: User, scheduler: ScriptedScheduler, tick: Tick) -> Sweep:
    """Return a sweep of six jobs, of which three run at a time."""
    text = 'name = "s"\n[run]\nsteps = 9\n[sweep]\nat_once = 3\n[sweep.over]\n"run.seed" = [1, 2, 3, 4, 5, 6]\n'
    created, _ = sweeps.submit(oskar, SweepSpec.parse_toml(text), spec_toml=text)
    tick()
    return created


def kill(scheduler: ScriptedScheduler, tick: Tick, jobs: range, cause: str, fingerprint: str) -> None:
    for index in jobs:
        attempt = Attempt.objects.get(job__sweep_index=index)
        scheduler.update_job(attempt.scheduler_id, state="running", nodes=("dgx-01",))
        tick()
        scheduler.update_job(attempt.scheduler_id, state="failed", exit_code=1)
        tick()
        verdict(attempt, cause, fingerprint=fingerprint, says="Unhandled exception: KeyError: 'a'.")
        tick()


def test_a_sweep_stops_when_its_first_jobs_fail_for_the_same_reason(
    sweep: Sweep, scheduler: ScriptedScheduler, tick: Tick, oskar: User
) -> None:
    kill(scheduler, tick, range(2), "program.exception", "same")
    sweep.refresh_from_db()
    assert not sweep.stopped_why
    assert Attempt.objects.exclude(scheduler_id="").count() == 5, "each that ends makes room for another"
    kill(scheduler, tick, range(2, 3), "program.exception", "same")
    sweep.refresh_from_db()
    assert sweep.stopped_why == (
        "Its first 3 jobs failed for the same reason: Unhandled exception: KeyError: 'a'. "
        "Jobs that had not started were cancelled."
    )
    tick()
    waiting = Attempt.objects.get(job__sweep_index=5)
    assert (waiting.state, waiting.scheduler_id) == ("cancelled", "")
    assert waiting.reason.startswith("Its sweep was stopped. Its first 3 jobs failed for the same reason")
    assert sorted(scheduler.cancelled) == [Attempt.objects.get(job__sweep_index=n).scheduler_id for n in (3, 4)]
    assert bearer(oskar).get(f"/api/v1/sweeps/{sweep.pk}").json()["stopped_why"] == sweep.stopped_why
    assert "failed for the same reason" in signed_in(oskar).get(f"/sweeps/{sweep.pk}").text


@pytest.mark.parametrize(
    ("cause", "fingerprints"),
    [("program.exception", "aab"), ("gpu.ecc", "aaa"), ("program.exception", ["", "", ""])],
)
def test_a_sweep_continues_where_they_failed_for_different_reasons(
    sweep: Sweep, scheduler: ScriptedScheduler, tick: Tick, cause: str, fingerprints: list[str]
) -> None:
    for index, fingerprint in enumerate(fingerprints):
        kill(scheduler, tick, range(index, index + 1), cause, fingerprint)
    sweep.refresh_from_db()
    assert not sweep.stopped_why
