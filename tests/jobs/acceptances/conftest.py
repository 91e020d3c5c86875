"""Shared fixtures of the tests of acceptances."""

from __future__ import annotations

from typing import Any

import pytest

from tests.jobs.burnins.bench import Bench
from tests.lab import sysadmin
from tests.nodes.remediation.cluster import Lab


@pytest.fixture
def bench(settings: Any, db: None) -> Bench:
    settings.VIGIL_HEALTH = "propose"
    return Bench(Lab(), sysadmin("ops"))
