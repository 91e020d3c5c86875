"""Vigil undrains only what its rules drained, while their reason stands and nothing else is wrong."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from django.db.models import F
from django.utils import timezone

from nodes.cluster import drain, sync
from nodes.drains import maintenance
from nodes.models import HealthControl, HealthEntry, Node, NodeOrder, Reading, SiteRule
from nodes.remediation import inbox
from nodes.remediation.limits_used import automatic_drains
from nodes.schedulers.base import SchedulerError
from nodes.tasks import health
from tests.lab import sysadmin
from tests.nodes.remediation.cluster import Lab

pytestmark = pytest.mark.django_db


def drained_by_rule(lab: Lab) -> None:
    lab.xid(79)
    lab.step()
    assert lab.scheduler.drained


def test_returns_once_the_entry_is_cleared(lab: Lab) -> None:
    drained_by_rule(lab)
    lab.step()
    assert lab.scheduler.drained, "it is still open"
    inbox.clear(sysadmin("ops"), lab.entry().pk, "reseated, burn-in passed")
    lab.step()
    assert not lab.scheduler.drained
    assert [order.action for order in NodeOrder.objects.order_by("id")] == ["drain", "undrain"]
    lab.step()
    assert NodeOrder.objects.count() == 2


def test_stays_out_while_something_else_speaks_against_it(lab: Lab) -> None:
    SiteRule.objects.create(
        name="xid-31",
        toml="""
[[rule]]
name = "xid-31"
title = "Xid 31"
source = "a test"
severity = "critical"
action = "drain"
signal = "xid"
where = { code = 31 }
clears = "person"
""",
    )
    lab.xid(79)
    lab.xid(31)
    lab.step()
    assert NodeOrder.objects.count() == 1, "two rules, one drain"
    ops = sysadmin("ops")
    inbox.clear(ops, lab.entry("off-bus").pk, "reseated")
    lab.step()
    assert lab.scheduler.drained
    inbox.clear(ops, lab.entry("xid-31").pk, "fixed")
    lab.step()
    assert not lab.scheduler.drained


def test_stays_out_while_what_it_was_drained_for_is_only_dismissed(lab: Lab) -> None:
    drained_by_rule(lab)
    ops = sysadmin("ops")
    inbox.dismiss(ops, lab.entry().pk, "board ordered")
    lab.step()
    assert lab.scheduler.drained
    inbox.clear(ops, lab.entry().pk, "new board")
    lab.step()
    assert not lab.scheduler.drained


def test_what_was_dismissed_instead_of_drained_for_does_not_keep_it_out(lab: Lab, settings: Any) -> None:
    settings.VIGIL_HEALTH = "propose"
    lab.xid(119)
    lab.step()
    harmless = HealthEntry.objects.waiting().get()
    ops = sysadmin("ops")
    inbox.dismiss(ops, harmless.pk, "known, harmless here")
    settings.VIGIL_HEALTH = "act"
    drained_by_rule(lab)
    inbox.clear(ops, lab.entry().pk, "reseated")
    lab.step()
    assert not lab.scheduler.drained


def test_a_person_who_drained_it_meanwhile_keeps_it(lab: Lab) -> None:
    drained_by_rule(lab)
    ops = sysadmin("ops")
    node = Node.objects.get(name="dgx-01")
    drain.request_order(ops, node, NodeOrder.Action.DRAIN, "waits for a part", replaces=node.reason)
    lab.step()
    assert lab.scheduler.drained == {"dgx-01": "waits for a part (vigil: ops)"}
    inbox.clear(ops, lab.entry().pk, "reseated")
    lab.step()
    assert lab.scheduler.drained


def test_a_reason_that_somebody_changed_with_scontrol_keeps_it(lab: Lab) -> None:
    drained_by_rule(lab)
    lab.scheduler.drain("dgx-01", "mine now")
    lab.step()
    inbox.clear(sysadmin("ops"), lab.entry().pk, "reseated")
    lab.step()
    assert lab.scheduler.drained == {"dgx-01": "mine now"}


def test_does_not_return_while_a_job_still_runs_there(lab: Lab) -> None:
    drained_by_rule(lab)
    set_machine(lab, state="draining", cpus_used=8)
    inbox.clear(sysadmin("ops"), lab.entry().pk, "reseated")
    lab.step()
    assert lab.scheduler.drained
    set_machine(lab, state="completing", cpus_used=0)
    lab.step()
    assert lab.scheduler.drained
    set_machine(lab, state="drained")
    lab.step()
    assert not lab.scheduler.drained


@pytest.mark.parametrize("state", ["idle+drain", "drained", "idle+drain+dynamic_norm"])
def test_returns_from_any_drained_state_of_slurm(lab: Lab, state: str) -> None:
    drained_by_rule(lab)
    set_machine(lab, state=state)
    inbox.clear(sysadmin("ops"), lab.entry().pk, "reseated")
    lab.step()
    assert not lab.scheduler.drained


@pytest.mark.parametrize(
    "state", ["mixed+drain", "down+drain", "down*", "idle+drain+completing", "drain*", "drained+powered_down"]
)
def test_stays_out_while_it_is_anything_else_but_drained(lab: Lab, state: str) -> None:
    drained_by_rule(lab)
    set_machine(lab, state=state)
    inbox.clear(sysadmin("ops"), lab.entry().pk, "reseated")
    lab.step()
    assert lab.scheduler.drained


def test_stays_out_while_its_maintenance_lasts(lab: Lab) -> None:
    drained_by_rule(lab)
    ops, now = sysadmin("ops"), timezone.now()
    window = maintenance.plan(ops, "dgx-01", "new fan", now - timedelta(minutes=1), now + timedelta(hours=1))
    inbox.clear(ops, lab.entry().pk, "reseated")
    lab.step()
    assert lab.scheduler.drained
    maintenance.cancel(ops, window)
    lab.step()
    assert not lab.scheduler.drained


def test_stays_out_while_the_breaker_is_tripped(lab: Lab) -> None:
    drained_by_rule(lab)
    HealthControl.objects.update(tripped_at=timezone.now(), tripped_by="off-bus")
    inbox.clear(sysadmin("ops"), lab.entry().pk, "reseated")
    lab.step()
    assert lab.scheduler.drained
    inbox.reset_breaker(sysadmin("root"), "a switch was rebooted")
    lab.step()
    assert not lab.scheduler.drained


def test_is_returned_again_some_time_after_the_scheduler_refused_it(lab: Lab) -> None:
    drained_by_rule(lab)
    lab.scheduler.broken_parts["undrain"] = SchedulerError("Slurm is being upgraded", permanent=True)
    inbox.clear(sysadmin("ops"), lab.entry().pk, "reseated")
    lab.step()
    del lab.scheduler.broken_parts["undrain"]
    lab.step()
    assert lab.scheduler.drained, "not at once: nobody wants an order per tick"
    NodeOrder.objects.filter(action="undrain").update(ended_at=F("ended_at") - drain.GIVE_UP)
    lab.step()
    assert not lab.scheduler.drained


@pytest.mark.parametrize("is_limit_reached", [False, True])
def test_a_finding_of_another_rule_stops_the_return(lab: Lab, *, is_limit_reached: bool) -> None:
    drained_by_rule(lab)
    ops = sysadmin("ops")
    inbox.clear(ops, lab.entry().pk, "reseated")
    health()
    assert NodeOrder.objects.open().get().action == "undrain"
    if is_limit_reached:
        NodeOrder.objects.filter(action="drain").update(asked_at=F("asked_at") - timedelta(hours=2))
        NodeOrder.objects.create(node="dgx-02", action="drain", rule="off-bus", state="done")
    lab.xid(119)
    lab.step()
    assert "dgx-01" in lab.scheduler.drained
    entry = HealthEntry.objects.open().get(node="dgx-01")
    assert (entry.decision, entry.order.state) == ("automatic", "done")  # type: ignore[union-attr]
    assert entry.order.node == "dgx-01"  # type: ignore[union-attr]
    inbox.clear(ops, entry.pk, "replaced")
    lab.step()
    assert "dgx-01" not in lab.scheduler.drained


def test_a_finding_while_the_return_is_under_way_is_not_taken_for_drained(
    lab: Lab, settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    drained_by_rule(lab)
    inbox.clear(sysadmin("ops"), lab.entry().pk, "reseated")
    health()
    undrain = lab.scheduler.undrain

    def undrain_slowly(node: str) -> None:
        settings.VIGIL_HEALTH = "propose"
        lab.xid(119)
        health()
        undrain(node)

    monkeypatch.setattr(lab.scheduler, "undrain", undrain_slowly)
    drain.carry_out(lab.scheduler)
    assert not lab.scheduler.drained
    entry = HealthEntry.objects.open().get(node="dgx-01")
    assert (entry.decision, entry.order) == ("proposed", None)


def test_a_persons_order_that_was_refused_does_not_stop_the_return(lab: Lab) -> None:
    drained_by_rule(lab)
    ops, node = sysadmin("ops"), Node.objects.get(name="dgx-01")
    drain.request_order(ops, node, NodeOrder.Action.UNDRAIN, replaces=node.reason)
    lab.scheduler.broken_parts["undrain"] = SchedulerError("Slurm is being upgraded", permanent=True)
    lab.step()
    assert NodeOrder.objects.latest("id").state == "refused"
    del lab.scheduler.broken_parts["undrain"]
    lab.xid(119)
    lab.step()
    entry = HealthEntry.objects.open().exclude(rule="off-bus").get(node="dgx-01")
    assert entry.decision == "automatic", "it joins the drain that stands"
    for open_entry in HealthEntry.objects.open().filter(node="dgx-01"):
        inbox.clear(ops, open_entry.pk, "reseated")
    lab.step()
    assert not lab.scheduler.drained


def approved(lab: Lab, settings: Any) -> HealthEntry:
    """Let ops approve what the rule proposes; from then on Vigil may act."""
    settings.VIGIL_HEALTH = "propose"
    lab.xid(79)
    lab.step()
    inbox.approve(sysadmin("ops"), lab.entry().pk, "board ordered")
    lab.step()
    assert lab.scheduler.drained == {"dgx-01": "[node] Xid 79 on GPU 0: off-bus (vigil: ops)"}
    settings.VIGIL_HEALTH = "act"
    return lab.entry()


def test_returns_what_a_person_approved(lab: Lab, settings: Any) -> None:
    entry = approved(lab, settings)
    lab.step()
    assert lab.scheduler.drained, "its finding is open"
    inbox.clear(sysadmin("eva"), entry.pk, "reseated")
    settings.VIGIL_HEALTH = "propose"
    lab.step()
    assert lab.scheduler.drained, "Vigil only proposes"
    settings.VIGIL_HEALTH = "act"
    lab.step()
    assert not lab.scheduler.drained
    assert NodeOrder.objects.latest("id").origin_text == "by the health rule off-bus"
    lab.step()
    assert NodeOrder.objects.count() == 2


@pytest.mark.parametrize("change", ["reason", "order"])
def test_a_person_who_changed_an_approved_drain_keeps_it(lab: Lab, settings: Any, change: str) -> None:
    entry = approved(lab, settings)
    if change == "reason":
        lab.scheduler.drain("dgx-01", "chassis open")
    else:
        node = Node.objects.get(name="dgx-01")
        drain.request_order(entry.decided_by, node, NodeOrder.Action.DRAIN, "chassis open")
    lab.step()
    inbox.clear(entry.decided_by, entry.pk, "reseated")
    lab.step()
    assert lab.scheduler.drained["dgx-01"].startswith("chassis open")


def test_another_finding_joins_an_approved_drain_and_uses_no_limit(lab: Lab, settings: Any) -> None:
    first = approved(lab, settings)
    lab.xid(119)
    lab.step()
    second = HealthEntry.objects.open().exclude(pk=first.pk).get(node="dgx-01")
    assert (second.decision, second.order) == ("automatic", first.order)
    assert not automatic_drains(timezone.now())
    inbox.clear(first.decided_by, first.pk, "reseated")
    lab.step()
    assert lab.scheduler.drained
    inbox.clear(first.decided_by, second.pk, "reseated")
    lab.step()
    assert not lab.scheduler.drained


def test_an_approval_does_not_take_over_the_drain_of_a_person(lab: Lab, settings: Any) -> None:
    ops = sysadmin("ops")
    drain.request_order(ops, Node.objects.get(name="dgx-01"), NodeOrder.Action.DRAIN, "chassis open")
    lab.step()
    lab.xid(79)
    lab.step()
    with pytest.raises(drain.DrainedByAnother, match="chassis open"):
        inbox.approve(ops, lab.entry().pk, "seen")
    inbox.approve(ops, lab.entry().pk, "seen", replaces=Node.objects.get(name="dgx-01").reason)
    lab.step()
    assert lab.scheduler.drained["dgx-01"].startswith("[node] Xid 79")


def set_machine(lab: Lab, **changes: Any) -> None:
    lab.scheduler.machines = [
        replace(machine, **changes) if machine.name == "dgx-01" else machine for machine in lab.scheduler.machines
    ]
    sync.read(lab.scheduler, Reading.Part.NODES)
