"""What the tests of the API share: a researcher and her token."""

import pytest
from django.test import Client

from portal.models import Project, User
from tests.lab import bearer, person


@pytest.fixture
def mira(project: Project) -> User:
    return person("mira", project)


@pytest.fixture
def client(mira: User) -> Client:
    return bearer(mira)
