"""Shared fixtures of the page tests: a researcher's browser."""

import pytest
from django.test import Client

from portal.models import User
from tests.lab import signed_in


@pytest.fixture
def client(mira: User) -> Client:
    return signed_in(mira)
