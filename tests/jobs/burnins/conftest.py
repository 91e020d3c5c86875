"""Shared fixtures of the tests of burn-ins."""

from __future__ import annotations

from typing import Any

import pytest

from tests.jobs.burnins.simulated_cluster import SimulatedCluster
from tests.lab import sysadmin
from tests.nodes.remediation.cluster import Lab


@pytest.fixture
def cluster(settings: Any, db: None) -> SimulatedCluster:
    settings.VIGIL_HEALTH = "act"
    return SimulatedCluster(Lab(), sysadmin("ops"))
