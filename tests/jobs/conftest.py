"""What the tests of jobs share: run directories, a project, two researchers in it, a scheduler that is to be told."""

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from jobs.following import end_reason, follow, poll
from jobs.reliability import mttf
from portal.models import Project, User
from tests.jobs.schedulers import ScriptedScheduler
from tests.lab import a_project, person

PARTS = ("FOLDERS", "SUBMIT", "ARRAY", "SETTLE", "COLLECT")  # of a tick, each with a budget of its own


@pytest.fixture(autouse=True)
def runs(tmp_path: Path, settings: Any) -> Path:
    """Where run directories are made."""
    settings.VIGIL_RUNS = tmp_path / "runs"
    settings.VIGIL_RUNS.mkdir()
    return tmp_path / "runs"


@pytest.fixture
def project() -> Project:
    return a_project()


@pytest.fixture
def mira(project: Project) -> User:
    return person("mira", project)


@pytest.fixture
def oskar(project: Project) -> User:
    return person("oskar", project)


@pytest.fixture(autouse=True)
def _ticks_have_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine they would leave work to the next."""
    for module, budget in (*((follow, f"{part}_S") for part in PARTS), (poll, "APPLY_S")):
        monkeypatch.setattr(module, budget, 60.0)


@pytest.fixture
def scheduler() -> ScriptedScheduler:
    """A scheduler that tells what it is told."""
    return ScriptedScheduler()


@pytest.fixture(autouse=True)
def _no_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    """No worker diagnoses here, so none is waited for: what follows is decided by how an attempt ended."""
    monkeypatch.setattr(end_reason, "VERDICT_WITHIN", timedelta(0))


@pytest.fixture(autouse=True)
def _failures_are_looked_up_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """What one test has seen of its nodes is nothing to the next."""
    monkeypatch.setattr(mttf, "CACHE_S", 1e-9)
