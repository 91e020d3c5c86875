"""A browser client of a person who has federations."""

import pytest
from django.test import Client

from portal.models import User
from tests.lab import signed_in


@pytest.fixture
def client(mira: User) -> Client:
    return signed_in(mira)
