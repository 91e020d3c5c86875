"""What the tests of jobs share: run directories, a project, two researchers in it, a scheduler that is to be told."""

from pathlib import Path
from typing import Any

import pytest

from jobs.following import follow
from portal.models import Project, User
from tests.jobs.schedulers import Told
from tests.lab import a_project, person


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


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Told:
    """A scheduler that tells what it is told. Ticks have time: on a busy machine they would leave work to the next."""
    for budget in ("FOLDERS_S", "SUBMIT_S", "ARRAY_S", "SETTLE_S", "COLLECT_S"):
        monkeypatch.setattr(follow, budget, 60.0)
    return Told()
