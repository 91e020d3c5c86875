"""What the tests of jobs share: run directories, a project, two researchers in it, a scheduler that is to be told."""

from pathlib import Path
from typing import Any

import pytest

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
def told() -> Told:
    return Told()
