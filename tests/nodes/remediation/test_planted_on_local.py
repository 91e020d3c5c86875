"""Planted failures and harmless histories on the local scheduler, which has this machine as its only node.

A fifth of one node is none: whatever VIGIL_HEALTH is, Vigil never takes the only node out of service by itself. It
proposes, and a sysadmin decides.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from nodes.cluster import sync
from nodes.models import HealthEntry, NodeOrder
from nodes.remediation import inbox
from nodes.schedulers.local import shim
from nodes.schedulers.local.machine import LocalGpu
from nodes.schedulers.local.scheduler import LocalScheduler
from portal.models import AuditEntry
from tests.lab import sysadmin
from tests.nodes.remediation import planted
from tests.nodes.remediation.cluster import NAMES, AgentFleet
from tests.nodes.remediation.planted import FAILURES, HARMLESS, Plant, PlantedFailure

pytestmark = pytest.mark.django_db
ONLY_ON_CLUSTERS = {"a node a fifth slower than its peers", "a reboot", "planned maintenance"}
"""The only node has no peers, runs while the portal does, and has no reservations for maintenance."""


@pytest.fixture
def fleet(settings: Any, tmp_path: Path) -> AgentFleet:
    """Return this machine under its scheduler; agents of machines besides it report, too, and are compared with it."""
    settings.VIGIL_HEALTH, settings.VIGIL_SCHEDULER = "act", "local"
    scheduler = LocalScheduler(tmp_path / "scheduler", cpus=2, gpus=[LocalGpu(str(i), "H100") for i in range(2)])
    sync.read(scheduler)
    return AgentFleet((shim.node_names(1)[0], *NAMES[1:]), scheduler)


@pytest.mark.parametrize("name", sorted(FAILURES.keys() - ONLY_ON_CLUSTERS))
def test_a_failure_is_proposed_and_drains_once_approved(fleet: AgentFleet, name: str) -> None:
    failure: PlantedFailure = FAILURES[name]
    failure.plant(fleet)
    entry = planted.check_finding(fleet, failure)
    if not failure.reason:
        planted.check_decision(fleet, failure, entry)
        return
    assert (entry.decision, fleet.drained_nodes()) == ("proposed", {})
    assert entry.held_back.startswith("local has 1 node. Vigil drains by itself only where a partition has 5 or more")
    assert not AuditEntry.objects.exists()
    approve_and_check(fleet, failure.reason, entry)


def test_a_mount_that_hangs_is_proposed_once(fleet: AgentFleet) -> None:
    planted.check_mount_that_hangs(fleet)
    approve_and_check(fleet, planted.MOUNT_HUNG, fleet.entry("mount-hung"))


def approve_and_check(fleet: AgentFleet, reason: str, entry: HealthEntry) -> None:
    """Approve the entry, and check that the machine is drained once, with that reason, in the person's name."""
    observed = reason.partition(" (vigil: ")[0]
    ops = sysadmin("ops")
    inbox.approve(ops, entry.pk, "broken")
    fleet.step()
    assert fleet.drained_nodes() == {fleet.node: f"{observed}: {entry.rule} (vigil: ops)"}
    entry.refresh_from_db()
    order = NodeOrder.objects.get()
    assert (entry.decision, entry.order, order.state, order.asked_by) == ("approved", order, "done", ops)
    audit = {(line.user, line.action, line.thing) for line in AuditEntry.objects.all()}
    assert audit == {(ops, "drain", fleet.node), (ops, "finding.approved", f"{entry.rule} on {fleet.node}")}


@pytest.mark.parametrize("name", sorted(HARMLESS.keys() - ONLY_ON_CLUSTERS))
def test_a_harmless_history_drains_nothing(fleet: AgentFleet, name: str) -> None:
    history: Plant = HARMLESS[name]
    history(fleet)
    planted.check_no_drain(fleet)
    assert not HealthEntry.objects.filter(decision="proposed").exists() or name == "events from an outage"
