"""Test workers and sysadmins who act at the same moment, on separate connections: limits hold, nothing repeats."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from typing import Any

import pytest
from django.db import connection
from django.utils import timezone

from jobs.burnins import returning
from nodes.cluster import drain
from nodes.drains import bulk, maintenance
from nodes.models import BurnIn, BurnInNode, HealthEntry, Node, NodeOrder
from nodes.monitoring.evaluate import evaluate
from nodes.remediation import inbox
from nodes.remediation.decide import decide
from portal.models import AuditEntry
from tests.lab import sysadmin
from tests.nodes.remediation.cluster import Lab

pytestmark = [
    pytest.mark.skipif(connection.vendor != "postgresql", reason="On SQLite one writes at a time"),
    pytest.mark.django_db(transaction=True),
]
WORKERS = 4


def at_once(work: Callable[[int], Any]) -> None:
    """Call it on several connections at the same moment; what is refused there is no failure."""
    together = threading.Barrier(WORKERS, timeout=60)

    def begin(number: int) -> None:
        try:
            together.wait()
            with suppress(drain.DrainedByAnother, drain.OrderedByPerson, inbox.NotPossible):
                work(number)
        finally:
            connection.close()

    with ThreadPoolExecutor(WORKERS) as pool:
        list(pool.map(begin, range(WORKERS)))


@pytest.fixture
def lab(settings: Any) -> Lab:
    settings.VIGIL_HEALTH = "act"
    return Lab()


def test_workers_together_exceed_no_limit(lab: Lab) -> None:
    for node in lab.names[:2]:  # a third would trip the breaker; of twelve nodes one an hour may be drained
        lab.xid(79, node)
    evaluate()
    at_once(lambda _: decide())
    assert NodeOrder.objects.count() == 1
    decisions = sorted(HealthEntry.objects.filter(rule="off-bus").values_list("decision", flat=True))
    assert decisions == ["automatic", "proposed"]


def test_workers_together_open_each_finding_once(lab: Lab) -> None:
    for node in lab.names[:4]:
        lab.xid(79, node)
    at_once(lambda _: evaluate())
    assert HealthEntry.objects.filter(rule="off-bus").count() == 4
    assert set(HealthEntry.objects.values_list("count", flat=True)) == {1}


def test_sysadmins_together_drain_once(lab: Lab, settings: Any) -> None:
    settings.VIGIL_HEALTH = "propose"
    people = [sysadmin(f"ops{number}") for number in range(WORKERS)]
    lab.xid(79)
    lab.step()
    entry = lab.entry()
    at_once(lambda number: inbox.approve(people[number], entry.pk, f"reason {number}"))
    assert NodeOrder.objects.filter(action=NodeOrder.Action.DRAIN).count() == 1
    entry.refresh_from_db()
    assert entry.decision == "approved"


def test_a_person_and_a_rule_together_leave_a_single_drain(lab: Lab) -> None:
    """Whoever comes first: the node is drained once for the scheduler, and the person's reason is never replaced."""
    ops = sysadmin("ops")
    lab.xid(79)
    evaluate()

    def work(number: int) -> Any:
        if number:
            return decide()
        return drain.request_order(ops, Node.objects.get(name="dgx-01"), NodeOrder.Action.DRAIN, "smells burnt")

    at_once(work)
    lab.step()
    node = Node.objects.get(name="dgx-01")
    assert "drain" in node.state
    by_person = NodeOrder.objects.filter(asked_by=ops).first()
    if by_person is not None:
        assert "smells burnt" in node.reason
    else:
        assert "vigil: off-bus" in node.reason


def test_an_approval_and_a_clearing_together_leave_a_single_order_and_a_cleared_entry(lab: Lab, settings: Any) -> None:
    settings.VIGIL_HEALTH = "propose"
    ops = sysadmin("ops")
    lab.xid(79)
    lab.step()
    entry = lab.entry()
    at_once(lambda number: (inbox.approve if number % 2 else inbox.clear)(ops, entry.pk, "seen at once"))
    entry.refresh_from_db()
    assert entry.state == "cleared"
    orders = list(NodeOrder.objects.all())
    assert len(orders) <= 1
    assert [order.pk for order in orders] == ([entry.order_id] if orders else [])
    assert AuditEntry.objects.filter(action="drain").count() == len(orders)
    assert AuditEntry.objects.filter(action="finding.cleared").count() == 1


def test_a_window_and_a_rule_together_drain_once(lab: Lab) -> None:
    """The rule's reason stays in the scheduler, as something is broken, or the window's with the finding open."""
    now = timezone.now()
    lab.xid(79)
    evaluate()
    window = maintenance.plan(sysadmin("ops"), "dgx-[01-02]", "new switch", now, now + timedelta(hours=1))
    at_once(lambda number: maintenance.advance() if number % 2 else decide())
    for _ in range(3):
        lab.step()
    done = NodeOrder.objects.filter(action=NodeOrder.Action.DRAIN, state=NodeOrder.State.DONE)
    assert sorted(done.values_list("node", flat=True)) == ["dgx-01", "dgx-02"]
    maintenance.cancel(sysadmin("sam"), window)
    lab.step()
    lab.step()
    assert set(lab.scheduler.drained) == {"dgx-01"}, "the finding is open"


def test_a_burn_in_that_fails_while_a_person_undrains_the_node(lab: Lab) -> None:
    """The person decides: the burn-in's drain is refused or replaced, and nobody orders twice."""
    ops, now = sysadmin("ops"), timezone.now()
    burn_in = BurnIn.objects.create(key="burnin1", seconds=60, state="returning", started_by=ops, started_at=now)
    findings = [{"text": "GPU 0 computed other products.", "is_warning": False}]
    BurnInNode.objects.create(burn_in=burn_in, node="dgx-01", verdict="failed", findings=findings)

    def work(number: int) -> Any:
        if number % 2:
            return drain.request_order(ops, Node.objects.get(name="dgx-01"), NodeOrder.Action.UNDRAIN)
        return returning.order_all(burn_in, "burn-in")

    at_once(work)
    (order,) = NodeOrder.objects.open()
    assert (order.action, order.asked_by) == ("undrain", ops)
    assert NodeOrder.objects.filter(rule="burn-in").count() <= 1
    assert BurnInNode.objects.get().is_returned


def test_many_nodes_drained_and_returned_in_different_orders(lab: Lab) -> None:
    """Nobody waits for a lock of somebody who waits for theirs, and each node has one order."""
    people = [sysadmin(f"ops{number}") for number in range(WORKERS)]
    names = ",".join(reversed(lab.names))

    def work(number: int) -> Any:
        expression = names if number % 2 else "dgx-[01-12]"
        return bulk.drain_all(people[number], expression, f"reason {number}")

    for _ in range(3):
        at_once(work)
    assert NodeOrder.objects.open().count() == len(lab.names)
