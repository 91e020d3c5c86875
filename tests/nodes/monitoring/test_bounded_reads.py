"""What each tick reads does not grow with the history: indexes lead to it, and long columns stay unread."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from datetime import timedelta

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from nodes.cluster import sync
from nodes.models import Gpu, HealthEntry, NodeEvent, NodeOrder, Reading
from nodes.monitoring.states import States
from nodes.monitoring.temperatures import measure
from nodes.remediation import return_to_service
from nodes.remediation.return_to_service import return_recovered
from nodes.telemetry import gauges, thin
from portal.models import User
from tests.nodes.remediation.cluster import Lab

pytestmark = pytest.mark.django_db
DAY = timedelta(days=1)


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


@pytest.mark.parametrize("obstacle", ["jobs", "down", "dismissed", "refused", "person"])
def test_nodes_that_cannot_return_yet_take_no_transactions(lab: Lab, ops: User, obstacle: str) -> None:
    states = {"jobs": "draining", "down": "down"}
    for name in ("dgx-01", "dgx-02", "dgx-03"):
        lab.scheduler.drain(name, "[node] Xid 79 (vigil: off-bus)")
        order = NodeOrder.objects.create(
            node=name, action="drain", state="done", rule="off-bus", reason="[node] Xid 79", ended_at=timezone.now()
        )
        HealthEntry.objects.create(
            node=name, rule="off-bus", severity="fatal", action="drain", decision="automatic", order=order,
            state="dismissed" if obstacle == "dismissed" else "cleared",
            first_seen=timezone.now(), last_seen=timezone.now(), opened_at=timezone.now(), cleared_at=timezone.now(),
        )  # fmt: skip
        if obstacle in ("refused", "person"):
            NodeOrder.objects.create(
                node=name, action="undrain", state="refused" if obstacle == "refused" else "asked",
                rule="off-bus" if obstacle == "refused" else "", asked_by=None if obstacle == "refused" else ops,
                ended_at=timezone.now() if obstacle == "refused" else None,
            )  # fmt: skip
    lab.scheduler.machines = [
        replace(machine, state=states.get(obstacle, machine.state)) if machine.reason else machine
        for machine in lab.scheduler.machines
    ]
    sync.read(lab.scheduler, Reading.Part.NODES)
    with CaptureQueriesContext(connection) as queries:
        return_recovered()
    assert not [query["sql"] for query in queries if query["sql"].startswith("SAVEPOINT")]
    assert not NodeOrder.objects.filter(action="undrain", state="asked", asked_by=None).exists()


def test_nodes_return_within_a_budget(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("dgx-01", "dgx-02", "dgx-03"):
        order = NodeOrder.objects.create(
            node=name, action="drain", state="done", rule="off-bus", reason="[node] Xid 79", ended_at=timezone.now()
        )
        HealthEntry.objects.create(
            node=name, rule="off-bus", severity="fatal", action="drain", state="cleared", order=order,
            first_seen=timezone.now(), last_seen=timezone.now(), cleared_at=timezone.now(),
        )  # fmt: skip
        lab.scheduler.drain(name, "[node] Xid 79 (vigil: off-bus)")
    sync.read(lab.scheduler, Reading.Part.NODES)
    monkeypatch.setattr(return_to_service, "BUDGET_S", -1.0)
    for returned in (1, 2, 3):
        return_recovered()
        assert NodeOrder.objects.filter(action="undrain").count() == returned


def test_old_events_are_deleted_a_part_at_a_time(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thin, "MAX_DELETED", 3)
    agent, now = lab.machine().agent, timezone.now()
    ages = [days * DAY for days in (900, 900, 731, 900, 800, 729, 900, 1, *[0] * 9)]
    kinds = ["xid"] * 3 + ["mount.slow"] + ["xid"] * 13
    NodeEvent.objects.bulk_create(
        NodeEvent(agent=agent, kind=kind, at=now - age, last_at=now - age, is_open=kind == "mount.slow")
        for age, kind in zip(ages, kinds, strict=True)
    )
    with CaptureQueriesContext(connection) as queries:
        thin.forget()
    left = {(now - event.at).days: event.kind for event in NodeEvent.objects.exclude(at=now)}
    assert left == {900: "mount.slow", 729: "xid", 1: "xid"}
    of_events = [query["sql"] for query in queries if '"nodes_nodeevent"' in query["sql"]]
    assert len([sql for sql in of_events if sql.startswith("SELECT")]) == 4, "it stops where all are recent"
    assert all(" IN (" in sql for sql in of_events if sql.startswith("DELETE"))
    assert all("INTEGER PRIMARY KEY" in plan for plan in plans(of_events, "nodes_nodeevent"))


def test_metrics_sum_xids_from_an_index_alone(lab: Lab) -> None:
    lab.xid(79)
    with CaptureQueriesContext(connection) as queries:
        list(gauges.families())
    xids = [query["sql"] for query in queries if "'xid'" in query["sql"]]
    assert any("USING COVERING INDEX events_counted" in plan for plan in plans(xids, "nodes_nodeevent"))
