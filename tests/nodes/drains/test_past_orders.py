"""Windows and hot spares do not read all past orders at each tick: orders are never deleted."""

from __future__ import annotations

from datetime import timedelta

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from nodes.cluster import drain, sync
from nodes.drains import maintenance, spares
from nodes.models import HotSpare, Node, NodeOrder, Reading
from nodes.schedulers.base import SchedulerError
from portal.models import User
from tests.nodes.drains.windows import at, now, planned
from tests.nodes.monitoring.test_bounded_reads import plans
from tests.nodes.remediation.cluster import Lab

pytestmark = pytest.mark.django_db
BY_TIME = "USING INDEX orders_by_rules_since"


@pytest.fixture
def lab(lab: Lab) -> Lab:
    """Give each node a long history."""
    long_ago = timezone.now() - timedelta(days=300)
    for rule in ("", "off-bus"):
        NodeOrder.objects.bulk_create(
            NodeOrder(node=name, action="drain", state="done", rule=rule, ended_at=long_ago) for name in lab.names * 30
        )
    NodeOrder.objects.update(asked_at=long_ago)
    with connection.cursor() as cursor:
        cursor.execute("ANALYZE")
    return lab


def of_rule(queries: CaptureQueriesContext, rule: str) -> list[str]:
    """Return the queries that select orders by the name under which Vigil ordered them."""
    return [query["sql"] for query in queries if f"\"rule\" = '{rule}'" in query["sql"]]


def test_exchanges_are_counted_only_if_there_is_one_to_make(lab: Lab, ops: User) -> None:
    spares.add(ops, Node.objects.get(name="dgx-12"), "gpu")
    lab.step()
    with CaptureQueriesContext(connection) as queries:
        spares.advance()
    assert not of_rule(queries, "spare")
    lab.scheduler.drain("dgx-01", "")
    Node.objects.filter(name="dgx-01").update(state="down", reason="Not responding", reason_by="slurm")
    with CaptureQueriesContext(connection) as queries:
        spares.advance()
    assert HotSpare.objects.get().replaces == "dgx-01"
    (count,) = [sql for sql in of_rule(queries, "spare") if "COUNT" in sql]
    assert BY_TIME in "".join(plans([count], "nodes_nodeorder"))


def test_a_window_reads_only_orders_of_its_time(lab: Lab, ops: User) -> None:
    window = planned(ops)
    with CaptureQueriesContext(connection) as queries:
        at(lab)
    assert set(lab.scheduler.drained) == {"dgx-01", "dgx-02"}
    settled = plans(of_rule(queries, window.requester)[:1], "nodes_nodeorder")
    assert BY_TIME in "".join(settled), settled
    with CaptureQueriesContext(connection) as queries:
        maintenance.advance()
    assert not of_rule(queries, window.requester), "all its nodes are out of service"
    with CaptureQueriesContext(connection) as queries:
        maintenance.advance(now() + timedelta(minutes=61))
    (newest,) = [sql for sql in of_rule(queries, window.requester) if '"ended_at" DESC' in sql]
    assert BY_TIME in "".join(plans([newest], "nodes_nodeorder"))


@pytest.mark.parametrize("obstacle", ["gone", "another reason"])
def test_a_return_that_cannot_be_repeated_takes_no_place(
    lab: Lab, ops: User, monkeypatch: pytest.MonkeyPatch, obstacle: str
) -> None:
    monkeypatch.setattr(maintenance, "MAX_REPEATED", 1)
    planned(ops)
    at(lab)
    lab.scheduler.broken_parts["undrain"] = SchedulerError("no answer", permanent=True)
    at(lab, 61)
    del lab.scheduler.broken_parts["undrain"]
    if obstacle == "gone":
        lab.scheduler.machines = [machine for machine in lab.scheduler.machines if machine.name != "dgx-01"]
    else:
        lab.scheduler.drain("dgx-01", "broken fan")
    sync.read(lab.scheduler, Reading.Part.NODES)
    earlier = timezone.now() - drain.GIVE_UP - timedelta(minutes=1)
    NodeOrder.objects.filter(state="refused").update(asked_at=earlier, ended_at=earlier)
    NodeOrder.objects.filter(state="refused", node="dgx-01").update(asked_at=earlier - timedelta(minutes=1))
    lab.step()
    assert "dgx-02" not in lab.drained_nodes()
