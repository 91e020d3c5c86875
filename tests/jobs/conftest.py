"""Shared fixtures of the tests of jobs: run directories, a project, two researchers in it, a scripted scheduler."""

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from jobs.following import follow, poll
from jobs.following.end_causes import end_reason
from jobs.reliability import mtbf
from portal.models import Project, User
from tests.jobs.schedulers import ScriptedScheduler
from tests.lab import a_project, person

PARTS = ("FOLDERS", "SUBMIT", "ARRAY", "SETTLE", "COLLECT")  # of a tick, each with a separate budget


@pytest.fixture(autouse=True)
def runs(tmp_path: Path, settings: Any) -> Path:
    """Return the folder in which run directories are made."""
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
    """Give each part of a tick 60 seconds: on a busy machine it would otherwise leave work to the next tick."""
    for module, budget in (*((follow, f"{part}_S") for part in PARTS), (poll, "APPLY_S")):
        monkeypatch.setattr(module, budget, 60.0)


@pytest.fixture
def scheduler() -> ScriptedScheduler:
    """Return a scheduler that reports what the test sets."""
    return ScriptedScheduler()


@pytest.fixture(autouse=True)
def _no_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    """Do not wait for a verdict, as no worker diagnoses here: decide by how an attempt ended."""
    monkeypatch.setattr(end_reason, "VERDICT_WITHIN", timedelta(0))


@pytest.fixture(autouse=True)
def _no_cache_of_failures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disable the cache of node failures, which would carry over between tests."""
    monkeypatch.setattr(mtbf, "CACHE_S", 1e-9)
