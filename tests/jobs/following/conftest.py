"""Shared fixtures of the follower's tests: a tick, and a job that the scheduler has. Sweeps have separate tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta

import pytest

from jobs.following import follow
from jobs.following.end_causes import end_reason
from jobs.intake import spools
from jobs.models import Job
from jobs.spec import JobSpec, write_toml
from jobs.submitting.submit import submit
from portal.models import User
from tests.jobs.following.launchers import machines
from tests.jobs.schedulers import ScriptedScheduler


@pytest.fixture(autouse=True)
def _no_sweep(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spools, "collect", lambda attempt, root, until: None)


@pytest.fixture
def tick(scheduler: ScriptedScheduler, caplog: pytest.LogCaptureFixture) -> Iterator[Callable[[], bool]]:
    """Run one round of the follower; an exception that it had to tolerate fails the test."""
    yield lambda: follow.tick(scheduler)
    assert not [record.getMessage() for record in caplog.records if record.exc_info]


@pytest.fixture
def job(oskar: User, tick: Callable[[], bool]) -> Job:
    """Return a pending job that the scheduler has."""
    spec = JobSpec.parse({"name": "gpt", "restart": {"max_restarts": 1}})
    created, _ = submit(oskar, spec, spec_toml=write_toml(spec))
    tick()
    return created


@pytest.fixture
def _verdicts_are_waited_for(_no_verdict: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(end_reason, "VERDICT_WITHIN", timedelta(seconds=15))


@pytest.fixture
def job_of_two_nodes(
    _verdicts_are_waited_for: None, oskar: User, scheduler: ScriptedScheduler, tick: Callable[[], bool]
) -> Job:
    """Return a running job on two of twenty nodes."""
    machines(scheduler, *(f"dgx{number:02}" for number in range(1, 21)))
    spec = JobSpec.parse({"name": "gpt", "restart": {"max_restarts": 5}, "resources": {"nodes": 2}})
    created, _ = submit(oskar, spec, spec_toml=write_toml(spec))
    tick()
    return created
