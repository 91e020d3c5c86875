"""What each tick reads does not grow with the history: indexes lead to it, and long columns stay unread."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from nodes.models import Gpu, HealthEntry, NodeEvent, NodeOrder
from nodes.monitoring.states import States
from nodes.monitoring.temperatures import measure
from nodes.remediation.return_to_service import return_recovered
from nodes.telemetry import gauges
from tests.nodes.remediation.cluster import Lab

pytestmark = pytest.mark.django_db


def plans(queries: Iterable[str], table: str) -> list[str]:
    """Return how SQLite would find the rows of this table; skip the test on PostgreSQL."""
    if connection.vendor != "sqlite":
        pytest.skip("the plan of PostgreSQL depends on its statistics")
    found = []
    for sql in queries:
        if f'FROM "{table}"' in sql and sql.startswith("SELECT"):
            with connection.cursor() as cursor:
                cursor.cursor.execute(f"EXPLAIN QUERY PLAN {sql}")
                found += [row[-1] for row in cursor.cursor.fetchall()]
    return found


def test_open_events_and_sliced_gpus_are_found_by_an_index(lab: Lab) -> None:
    machine, now = lab.machine(), timezone.now()
    for number in range(300):
        at = now - timedelta(minutes=number)
        NodeEvent.objects.create(agent=machine.agent, kind="mount.slow", at=at, last_at=at)
    Gpu.objects.bulk_create(Gpu(uuid=f"GPU-{number}", agent=machine.agent, index=number) for number in range(300))
    lab.happens("mount.slow", mount="/data")
    with connection.cursor() as cursor:
        cursor.execute("ANALYZE")
    with CaptureQueriesContext(connection) as queries:
        states = States.read(now)
    assert [len(rows) for rows in states.lasting.values()] == [1]
    statements = [query["sql"] for query in queries]
    assert any("events_open" in plan for plan in plans(statements, "nodes_nodeevent"))
    assert any("gpus_with_mig" in plan for plan in plans(statements, "nodes_gpu"))


def test_temperatures_leave_facts_unread(lab: Lab) -> None:
    lab.machine()
    with CaptureQueriesContext(connection) as queries:
        measure()
    assert not [query["sql"] for query in queries if '"nodes_agent"."facts"' in query["sql"]]


def test_nodes_with_open_findings_take_no_queries(lab: Lab) -> None:
    lab.xid(79)
    lab.step()
    counts = []
    for more in ("", "dgx-02", "dgx-03"):
        if more:
            lab.scheduler.drain(more, "[node] Xid 79 (vigil: off-bus)")
            order = NodeOrder.objects.create(
                node=more, action="drain", state="done", rule="off-bus", reason="[node] Xid 79", ended_at=timezone.now()
            )
            HealthEntry.objects.create(
                node=more, rule="off-bus", state="open", severity="fatal", action="drain", decision="automatic",
                first_seen=timezone.now(), last_seen=timezone.now(), opened_at=timezone.now(), order=order,
            )  # fmt: skip
            lab.step()
        with CaptureQueriesContext(connection) as queries:
            return_recovered()
        counts.append(len(queries))
    assert set(lab.drained_nodes()) == {"dgx-01", "dgx-02", "dgx-03"}
    assert counts[0] == counts[1] == counts[2]


def test_metrics_sum_xids_from_an_index_alone(lab: Lab) -> None:
    lab.xid(79)
    with CaptureQueriesContext(connection) as queries:
        list(gauges.families())
    xids = [query["sql"] for query in queries if "'xid'" in query["sql"]]
    assert any("USING COVERING INDEX events_counted" in plan for plan in plans(xids, "nodes_nodeevent"))
