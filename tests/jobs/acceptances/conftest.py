"""Shared fixtures of the tests of acceptances."""

from __future__ import annotations

from typing import Any

import pytest
from django.test import Client

from tests.jobs.burnins.simulated_cluster import SimulatedCluster
from tests.lab import signed_in, sysadmin
from tests.nodes.remediation.cluster import Lab


@pytest.fixture
def cluster(settings: Any, db: None) -> SimulatedCluster:
    settings.VIGIL_HEALTH = "propose"
    return SimulatedCluster(Lab(), sysadmin("ops"))


@pytest.fixture
def client(cluster: SimulatedCluster) -> Client:
    return signed_in(cluster.user)
