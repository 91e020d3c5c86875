"""What the tests of the pages share: a project, a researcher in it, and her browser."""

import pytest
from django.test import Client

from portal.models import Project, User
from tests.lab import a_project, person, signed_in


@pytest.fixture
def project() -> Project:
    return a_project()


@pytest.fixture
def mira(project: Project) -> User:
    return person("mira", project)


@pytest.fixture
def client(mira: User) -> Client:
    return signed_in(mira)
