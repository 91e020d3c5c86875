"""What the tests of the API share: a researcher's token."""

import pytest
from django.test import Client

from portal.models import User
from tests.lab import bearer


@pytest.fixture
def client(mira: User) -> Client:
    return bearer(mira)
