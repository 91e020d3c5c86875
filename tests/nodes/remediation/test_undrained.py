"""A person undrains a node whose finding is open: that stands until the same happens again."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import pytest
from django.db.models import F
from django.utils import timezone

from nodes.cluster import drain, sync
from nodes.models import Node, NodeOrder, Reading
from nodes.monitoring.evaluate import evaluate
from nodes.remediation import inbox
from nodes.remediation.decide import decide
from nodes.tasks import alert, health
from portal.models import Notice, User
from tests.lab import signed_in
from tests.nodes.remediation.cluster import Lab

pytestmark = pytest.mark.django_db
HOURS_AGO = timedelta(hours=2)


def with_vigil(lab: Lab, ops: User) -> None:
    node = Node.objects.get(name=lab.node)
    drain.request_order(ops, node, NodeOrder.Action.UNDRAIN, replaces=node.reason)
    lab.step()


def in_the_scheduler(lab: Lab, ops: User) -> None:
    lab.scheduler.undrain(lab.node)
    sync.read(lab.scheduler, Reading.Part.NODES)


HOW = pytest.mark.parametrize("undrain", [with_vigil, in_the_scheduler])


def undrained(lab: Lab, ops: User, undrain: Any) -> None:
    """Let Vigil drain the first node for a finding, and a person undrain it hours later."""
    lab.xid(79)
    lab.step()
    assert list(lab.scheduler.drained) == [lab.node]
    NodeOrder.objects.update(asked_at=F("asked_at") - HOURS_AGO, ended_at=F("ended_at") - HOURS_AGO)
    undrain(lab, ops)
    for _ in range(2):
        lab.step()
    assert not lab.scheduler.drained, "what was observed before does not undo a person's undrain"


@HOW
def test_a_new_event_drains_the_node_again(lab: Lab, ops: User, undrain: Any) -> None:
    undrained(lab, ops, undrain)
    lab.xid(79, ago=-1, text="again")
    lab.step()
    assert list(lab.scheduler.drained) == [lab.node]
    entry = lab.entry()
    assert (entry.decision, entry.count, entry.held_back) == ("automatic", 2, "")
    assert entry.order == NodeOrder.objects.first()


@HOW
def test_a_new_event_is_proposed_where_vigil_only_proposes(lab: Lab, ops: User, undrain: Any, settings: Any) -> None:
    undrained(lab, ops, undrain)
    settings.VIGIL_HEALTH = "propose"
    lab.xid(79, ago=-1, text="again")
    lab.step()
    assert not lab.scheduler.drained
    assert (lab.entry().decision, lab.entry().order) == ("proposed", None)


def test_the_limits_hold(lab: Lab, ops: User) -> None:
    undrained(lab, ops, with_vigil)
    lab.xid(79, "dgx-02")
    lab.step()
    lab.xid(79, ago=-1, text="again")
    lab.step()
    assert list(lab.scheduler.drained) == ["dgx-02"]
    assert lab.entry(node="dgx-01").held_back == "Vigil has drained 1 of at most 1 nodes in the last hour."


def test_evidence_that_arrives_late_is_proposed(lab: Lab, ops: User) -> None:
    undrained(lab, ops, with_vigil)
    lab.xid(79, ago=-1, text="again")
    later = timezone.now() + timedelta(minutes=11)
    evaluate(later)
    decide(later)
    lab.step()
    assert not lab.scheduler.drained
    assert lab.entry().decision == "proposed"
    assert lab.entry().held_back == "Its evidence was more than 10 minutes old when it arrived."


def test_an_order_that_a_person_replaced_with_an_undrain(lab: Lab, ops: User) -> None:
    lab.xid(79)
    health()
    drain.request_order(ops, Node.objects.get(name=lab.node), NodeOrder.Action.UNDRAIN, replaces="")
    NodeOrder.objects.update(asked_at=F("asked_at") - HOURS_AGO)
    NodeOrder.objects.open().update(asked_at=timezone.now())
    for _ in range(2):
        lab.step()
    assert not lab.scheduler.drained
    lab.xid(79, ago=-1, text="again")
    lab.step()
    assert list(lab.scheduler.drained) == [lab.node]


def test_a_state_that_lasts_is_no_new_evidence_and_one_that_begins_again_is(lab: Lab, ops: User) -> None:
    gpu = lab.machine().gpus[0]
    lab.happens("gpu.lost", gpu=gpu, since=time.time())
    lab.later(0)
    lab.later(1)
    assert list(lab.scheduler.drained) == [lab.node]
    NodeOrder.objects.update(asked_at=F("asked_at") - HOURS_AGO, ended_at=F("ended_at") - HOURS_AGO)
    with_vigil(lab, ops)
    lab.later(3)
    assert not lab.scheduler.drained
    assert lab.entry().last_seen > lab.entry().decided_at  # type: ignore[operator]
    lab.happens("gpu.back", gpu=gpu)
    lab.later(4)
    assert not lab.scheduler.drained
    lab.happens("gpu.lost", gpu=gpu, since=time.time())
    lab.later(6)
    lab.later(7)
    assert list(lab.scheduler.drained) == [lab.node]


def test_notices_say_who_undrained_it_and_that_it_is_drained_again(lab: Lab, ops: User) -> None:
    lab.xid(79)
    lab.step()
    alert()
    notice = Notice.objects.get()
    assert notice.detail.startswith("Vigil drains the node.")
    with_vigil(lab, ops)
    lab.step()
    alert()
    notice.refresh_from_db()
    said = "ops undrained the node. If it happens again, Vigil decides again."
    assert notice.detail.startswith(said)
    assert said in signed_in(ops).get(f"/nodes/{lab.node}").content.decode()
    raised_at = notice.raised_at
    lab.xid(79, ago=-1, text="again")
    lab.step()
    alert()
    notice.refresh_from_db()
    assert notice.detail.startswith("Vigil drains the node.")
    assert notice.raised_at > raised_at, "that is news"


@HOW
def test_a_sysadmin_may_drain_it_again_or_clear_the_finding(lab: Lab, ops: User, undrain: Any) -> None:
    undrained(lab, ops, undrain)
    inbox.approve(ops, lab.entry().pk, "broken after all")
    lab.step()
    assert list(lab.scheduler.drained) == [lab.node]
    inbox.clear(ops, lab.entry().pk, "repaired")
    lab.step()
    lab.step()
    assert not lab.scheduler.drained
