"""Shared fixtures of the API tests: a researcher's token."""

import pytest
from django.test import Client

from portal.models import User
from tests.lab import bearer


@pytest.fixture
def client(mira: User) -> Client:
    return bearer(mira)
