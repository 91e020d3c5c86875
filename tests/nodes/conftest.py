"""Shared fixtures of the tests of nodes: a small cluster on which Vigil may act, and its sysadmin."""

from __future__ import annotations

from typing import Any

import pytest

from nodes import software_inventory
from portal.models import User
from tests.lab import sysadmin
from tests.nodes.remediation.cluster import Lab


@pytest.fixture(autouse=True)
def _inventory_is_not_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disable the cache of the inventory, which would carry over between tests."""
    monkeypatch.setattr(software_inventory, "CACHE_S", 1e-9)


@pytest.fixture
def lab(settings: Any, db: None) -> Lab:
    settings.VIGIL_HEALTH = "act"
    return Lab()


@pytest.fixture
def ops(db: None) -> User:
    return sysadmin("ops")
