"""Shared fixtures of the tests of drains."""

from __future__ import annotations

from typing import Any

import pytest

from tests.nodes.remediation.cluster import Lab


@pytest.fixture
def lab(settings: Any) -> Lab:
    settings.VIGIL_HEALTH = "act"
    return Lab()
