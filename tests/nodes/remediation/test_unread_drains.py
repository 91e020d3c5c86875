"""What is decided after a drain was carried out and before the nodes are read again: its row still says "idle"."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from django.db.models import F

from nodes.cluster import drain, sync
from nodes.models import HealthEntry, Node, NodeOrder, Reading
from nodes.remediation import inbox
from nodes.schedulers.base import SchedulerError
from nodes.tasks import health
from tests.lab import sysadmin
from tests.nodes.remediation.cluster import NAMES, Lab

pytestmark = pytest.mark.django_db


@pytest.fixture
def small(settings: Any) -> Lab:
    """Return a cluster of five nodes, of which one may be out of service."""
    settings.VIGIL_HEALTH = "act"
    return Lab(names=NAMES[:5])


def drain_unread(lab: Lab) -> None:
    """Drain the first node, and don't read the nodes after that; the hour of its drain is over."""
    lab.xid(79)
    health()
    drain.carry_out(lab.scheduler)
    assert list(lab.scheduler.drained) == [lab.node]
    assert Node.objects.get(name=lab.node).is_in_service, "not read again yet"
    NodeOrder.objects.update(asked_at=F("asked_at") - timedelta(hours=2))


@pytest.mark.parametrize("does_fail", [False, True], ids=["not yet", "the reading fails"])
def test_a_drain_counts_towards_its_partitions_limit_before_it_is_read(small: Lab, does_fail: bool) -> None:
    lab = small
    drain_unread(lab)
    if does_fail:
        lab.scheduler.broken_parts["nodes"] = SchedulerError("slurmctld restarts")
        sync.read(lab.scheduler, Reading.Part.NODES)
    lab.xid(79, NAMES[1])
    health()
    assert "1 of 5 nodes of gpu are out of service" in lab.entry(node=NAMES[1]).held_back
    lab.scheduler.broken_parts.clear()
    lab.step()
    assert list(lab.scheduler.drained) == [lab.node]


def test_nodes_that_persons_drained_since_count_when_a_drain_is_carried_out(small: Lab) -> None:
    lab = small
    lab.xid(79)
    health()
    lab.scheduler.drain(NAMES[1], "broken fan")
    drain.carry_out(lab.scheduler)
    assert list(lab.scheduler.drained) == [NAMES[1]]
    lab.step()
    entry = lab.entry()
    assert entry.decision == "proposed"
    assert "Its order was refused: 1 of 5 nodes of gpu are out of service" in entry.held_back
    inbox.approve(sysadmin("ops"), entry.pk, "both are needed out")
    lab.step()
    assert set(lab.scheduler.drained) == set(NAMES[:2])


@pytest.mark.parametrize("more", [{"code": 119}, {"code": 79, "gpu": 1}], ids=["another rule", "another GPU"])
def test_a_second_finding_joins_a_drain_that_is_not_read_yet(lab: Lab, more: dict[str, Any]) -> None:
    drain_unread(lab)
    lab.xid(**more)
    lab.step()
    (order,) = NodeOrder.objects.all()
    assert {(e.decision, e.order_id) for e in HealthEntry.objects.open()} == {("automatic", order.pk)}
    assert lab.scheduler.drained == {lab.node: "[node] Xid 79 on GPU 0 (vigil: off-bus)"}


def test_an_approved_finding_joins_a_drain_that_is_not_read_yet(lab: Lab, settings: Any) -> None:
    settings.VIGIL_HEALTH = "propose"
    ops = sysadmin("ops")
    lab.xid(79)
    lab.xid(119)
    health()
    first, second = HealthEntry.objects.waiting().order_by("pk").values_list("pk", flat=True)
    inbox.approve(ops, first, "seen")
    drain.carry_out(lab.scheduler)
    inbox.approve(ops, second, "seen, too")
    lab.step()
    assert NodeOrder.objects.count() == 1
