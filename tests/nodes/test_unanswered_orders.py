"""Test orders for nodes whose call was not answered, or whose node the scheduler does not report readably."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from django.db.models import F

from nodes.cluster import drain, sync
from nodes.models import Node, NodeOrder, Reading
from nodes.schedulers.base import SchedulerError
from portal.models import User
from tests.jobs.schedulers import ScriptedScheduler

pytestmark = pytest.mark.django_db


@pytest.fixture
def scheduler() -> ScriptedScheduler:
    scheduler = ScriptedScheduler()
    sync.read(scheduler)
    return scheduler


def order_by_rule() -> NodeOrder:
    return drain.request_order(None, Node.objects.get(), NodeOrder.Action.DRAIN, "Xid 79", rule="off-bus")


def report(scheduler: ScriptedScheduler, **changes: Any) -> None:
    scheduler.machines = [replace(scheduler.machines[0], **changes)]
    sync.read(scheduler, Reading.Part.NODES)


def set_last_call(ago: timedelta) -> None:
    NodeOrder.objects.update(tried_at=F("tried_at") - ago)


def test_a_drain_of_a_node_that_is_down_is_done_although_the_answer_was_lost(
    scheduler: ScriptedScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slurm reports a node that is down and drained as down, with the new reason."""
    report(scheduler, state="down", reason="Not responding", reason_by="slurm")
    order = order_by_rule()

    def lose_answer(node: str, reason: str) -> None:
        report(scheduler, state="down", reason="Xid 79", reason_by="off-bus")
        raise SchedulerError("no answer")

    monkeypatch.setattr(scheduler, "drain", lose_answer)
    drain.carry_out(scheduler)
    set_last_call(drain.AGAIN)
    drain.carry_out(scheduler)
    order.refresh_from_db()
    assert (order.state, order.outcome) == ("done", "")


def test_a_clock_that_is_set_back_delays_no_retry(scheduler: ScriptedScheduler) -> None:
    scheduler.broken_parts["drain"] = SchedulerError("no answer")
    order_by_rule()
    drain.carry_out(scheduler)
    set_last_call(-timedelta(hours=1))
    scheduler.broken_parts.clear()
    drain.carry_out(scheduler)
    assert list(scheduler.drained) == ["dgx-01"]


def test_only_people_order_for_a_node_whose_record_cannot_be_read(ops: User, scheduler: ScriptedScheduler) -> None:
    order = order_by_rule()
    machines, scheduler.machines, scheduler.unreadable = scheduler.machines, [], {"nodes": 1}
    drain.carry_out(scheduler)
    order.refresh_from_db()
    assert (order.state, order.outcome) == ("asked", "Not sent: The scheduler's record of dgx-01 could not be read.")
    scheduler.machines, scheduler.unreadable = machines, {}
    set_last_call(drain.AGAIN)
    drain.carry_out(scheduler)
    assert list(scheduler.drained) == ["dgx-01"], "nobody has changed it meanwhile"
