"""Shared fixtures of the tests of drains."""

from __future__ import annotations

from typing import Any

import pytest

from portal.models import User
from tests.lab import sysadmin
from tests.nodes.remediation.cluster import Lab


@pytest.fixture
def lab(settings: Any) -> Lab:
    settings.VIGIL_HEALTH = "act"
    return Lab()


@pytest.fixture
def ops() -> User:
    return sysadmin("ops")
