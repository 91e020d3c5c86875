"""Shared fixtures of the tests of nodes: a small cluster on which Vigil may act, and its sysadmin."""

from __future__ import annotations

from typing import Any

import pytest

from portal.models import User
from tests.lab import sysadmin
from tests.nodes.remediation.cluster import Lab


@pytest.fixture
def lab(settings: Any, db: None) -> Lab:
    settings.VIGIL_HEALTH = "act"
    return Lab()


@pytest.fixture
def ops(db: None) -> User:
    return sysadmin("ops")
