"""Shared fixtures of the tests of game days."""

from __future__ import annotations

import time
from typing import Any

import pytest

from jobs.gameday.advance import advance
from portal.models import Membership, User
from tests.jobs.gameday.faults import NODE, Fault
from tests.lab import a_project, sysadmin
from tests.nodes.remediation.cluster import Lab


@pytest.fixture
def ops() -> User:
    user = sysadmin("ops")
    Membership.objects.create(user=user, project=a_project("canaries"), role="researcher")
    return user


@pytest.fixture
def lab(settings: Any) -> Lab:
    settings.VIGIL_HEALTH = "act"
    lab = Lab()
    machine = lab.machine(NODE)
    machine.post(machine.facts(time.time(), game_day=True, slurm="24.11.5"))
    return lab


@pytest.fixture
def xid(lab: Lab, ops: User) -> Fault:
    found = Fault(lab, ops, "xid")
    advance()
    return found
