"""A decision against a finding withdraws the drain that was ordered for it."""

from __future__ import annotations

from typing import Any

import pytest

from nodes.cluster import drain, sync
from nodes.models import NodeOrder, Reading
from nodes.remediation import inbox
from nodes.tasks import health
from portal.models import User
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
