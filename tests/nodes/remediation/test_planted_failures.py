"""Failures that agents report end in the right finding, action and audit entry; harmless histories end in no drain.

Each is posted as an agent would post it, with VIGIL_HEALTH=act, and followed through rules, decision and scheduler.
`tests/slurm/test_planted_health.py` does the same on a real Slurm, `test_planted_on_local.py` on the local scheduler.
"""

from __future__ import annotations

from typing import Any

import pytest

from portal.models import AuditEntry
from tests.nodes.remediation import planted
from tests.nodes.remediation.cluster import Lab
from tests.nodes.remediation.planted import FAILURES, HARMLESS, Plant, PlantedFailure

pytestmark = pytest.mark.django_db


@pytest.fixture
def lab(settings: Any) -> Lab:
    settings.VIGIL_HEALTH = "act"
    return Lab()


@pytest.mark.parametrize("failure", FAILURES.values(), ids=FAILURES)
def test_a_failure_ends_in_a_single_finding_and_the_right_action(lab: Lab, failure: PlantedFailure) -> None:
    failure.plant(lab)
    planted.check_decision(lab, failure, planted.check_finding(lab, failure))


def test_a_mount_that_hangs_drains_once(lab: Lab) -> None:
    planted.check_mount_that_hangs(lab)
    assert lab.drained_nodes() == {lab.node: planted.MOUNT_HUNG}
    assert AuditEntry.objects.get().action == "drain"


def test_a_node_that_crashed_is_excluded(lab: Lab) -> None:
    planted.check_crashed_node(lab)
    assert not lab.drained_nodes()


@pytest.mark.parametrize("history", HARMLESS.values(), ids=HARMLESS)
def test_a_harmless_history_drains_nothing(lab: Lab, history: Plant) -> None:
    history(lab)
    planted.check_no_drain(lab)
