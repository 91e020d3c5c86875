"""A drain that waits is not carried out once its finding is over, by itself or by a decision."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import pytest
from django.db.models import F
from django.utils import timezone

from nodes.cluster import drain, sync
from nodes.models import HealthEntry, NodeOrder, Reading
from nodes.monitoring.evaluate import evaluate
from nodes.remediation import inbox
from nodes.schedulers.base import SchedulerError
from nodes.tasks import health
from portal.models import User
from tests.lab import sysadmin
from tests.nodes.remediation.cluster import Lab

pytestmark = pytest.mark.django_db
DECISIONS = pytest.mark.parametrize("decide", [inbox.dismiss, inbox.clear], ids=["dismiss", "clear"])


@DECISIONS
def test_a_drain_that_the_scheduler_has_not_received_is_withdrawn(lab: Lab, ops: User, decide: Any) -> None:
    lab.xid(79)
    health()
    decide(ops, lab.entry().pk, "a loose cable")
    lab.step()
    assert not lab.scheduler.drained
    assert NodeOrder.objects.get().state == "refused"
    assert "dismissed or cleared" in NodeOrder.objects.get().outcome


@DECISIONS
def test_a_drain_for_two_findings_lasts_while_either_is_open(lab: Lab, ops: User, decide: Any) -> None:
    lab.xid(79)
    lab.xid(62)
    health()
    assert lab.entry("microcontroller-halt").order == lab.entry().order
    decide(ops, lab.entry().pk, "a loose cable")
    lab.step()
    assert list(lab.scheduler.drained) == [lab.node]


@pytest.mark.parametrize("mode", ["act", "propose"])
@DECISIONS
def test_a_drain_that_is_under_way_is_undone(
    lab: Lab, ops: User, monkeypatch: pytest.MonkeyPatch, settings: Any, decide: Any, mode: str
) -> None:
    settings.VIGIL_HEALTH = mode
    lab.xid(79)
    health()
    if mode == "propose":
        inbox.approve(ops, lab.entry().pk, "seen")
    send = lab.scheduler.drain

    def send_slowly(node: str, reason: str) -> None:
        decide(ops, lab.entry().pk, "a loose cable")
        send(node, reason)

    monkeypatch.setattr(lab.scheduler, "drain", send_slowly)
    drain.carry_out(lab.scheduler)
    assert list(lab.scheduler.drained) == [lab.node]
    sync.read(lab.scheduler, Reading.Part.NODES)
    lab.step()
    assert not lab.scheduler.drained


@pytest.mark.parametrize("mode", ["act", "propose"])
def test_a_drain_for_a_finding_that_ended_by_itself_is_not_carried_out(lab: Lab, settings: Any, mode: str) -> None:
    settings.VIGIL_HEALTH = mode
    lab.scheduler.broken_parts["drain"] = SchedulerError("no answer")
    lab.xid(109, ago=60)
    lab.step()
    entry = lab.entry("context-switch-timeout")
    if mode == "propose":
        inbox.approve(sysadmin("ops"), entry.pk, "seen")
        lab.step()
    lab.happens("boot", booted_at=time.time())
    lab.step()
    evaluate(timezone.now() + timedelta(minutes=6))
    entry.refresh_from_db()
    assert entry.state == "cleared"
    assert NodeOrder.objects.get().state == "asked"
    lab.scheduler.broken_parts.clear()
    NodeOrder.objects.update(tried_at=F("tried_at") - drain.AGAIN)
    drain.carry_out(lab.scheduler)
    assert not lab.scheduler.drained
    assert (NodeOrder.objects.get().state, NodeOrder.objects.get().outcome) == ("refused", "The finding is over.")


def test_a_drain_lasts_while_one_of_its_findings_is_open(lab: Lab) -> None:
    lab.xid(79)
    lab.xid(62)
    health()
    HealthEntry.objects.filter(rule="off-bus").update(state="cleared")
    drain.carry_out(lab.scheduler)
    assert list(lab.scheduler.drained) == [lab.node]
