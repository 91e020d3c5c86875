"""Whatever is ordered for many nodes at once, no transaction is long: on SQLite every other writer waits for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from django.db import connection

from nodes.drains import bulk, maintenance, spares
from nodes.models import HotSpare, NodeOrder
from portal.models import User
from tests.nodes.remediation.cluster import Lab

pytestmark = pytest.mark.django_db
NAMES = tuple(f"dgx-{number:03}" for number in range(1, 46))
MOST = 260
"""Statements of one transaction: about 100 ms on SQLite."""


@contextmanager
def longest_transaction() -> Iterator[list[int]]:
    """Give the number of statements of each outermost transaction; in a test it is a savepoint."""
    found, depth = [0], 0

    def count(execute: Callable[..., Any], sql: str, *others: Any) -> Any:
        nonlocal depth
        if sql.startswith("SAVEPOINT"):
            depth += 1
            if depth == 1:
                found.append(0)
        elif sql.startswith(("RELEASE", "ROLLBACK TO")):
            depth -= sql.startswith("RELEASE")
        elif depth:
            found[-1] += 1
        return execute(sql, *others)

    with connection.execute_wrapper(count):
        yield found


@pytest.fixture
def lab() -> Lab:
    return Lab(names=NAMES)


def test_a_drain_of_many_nodes(lab: Lab, ops: User) -> None:
    with longest_transaction() as found:
        bulk.drain_all(ops, "dgx-[001-045]", "new switch")
    assert NodeOrder.objects.open().count() == 45
    assert max(found) <= MOST


def test_a_window_of_many_nodes_begins_and_is_cancelled(lab: Lab, ops: User) -> None:
    now = datetime.now(UTC)
    window = maintenance.plan(ops, "dgx-[001-045]", "new switch", now, now + timedelta(hours=1))
    with longest_transaction() as found:
        maintenance.advance(now + timedelta(minutes=1))
        assert NodeOrder.objects.open().count() == 45
        NodeOrder.objects.update(state="done")
        lab.scheduler.drained.update({order.node: order.reason_with_requester for order in NodeOrder.objects.all()})
        for node, reason in dict(lab.scheduler.drained).items():
            lab.scheduler.drain(node, reason)
        lab.step()
        assert maintenance.cancel(ops, window)
    assert NodeOrder.objects.filter(action="undrain", state="asked").count() == 45
    assert max(found) <= MOST


def test_many_spares_are_drained_a_part_at_a_time(lab: Lab, ops: User) -> None:
    HotSpare.objects.bulk_create([HotSpare(node=name, partition="gpu", added_by=ops) for name in NAMES[:30]])
    with longest_transaction() as found:
        for _ in range(2):
            spares.advance()
    assert NodeOrder.objects.open().count() == 30
    assert max(found) <= MOST
