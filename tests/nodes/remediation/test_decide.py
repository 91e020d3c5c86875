"""What a machine reports becomes a health entry, and with VIGIL_HEALTH=act one drain, audited and within limits."""

from __future__ import annotations

import time
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from django.db import connection
from django.db.models import F
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from nodes.cluster import drain, sync
from nodes.drains import bulk, maintenance
from nodes.models import HealthControl, HealthEntry, Node, NodeEvent, NodeOrder, Partition, Reading
from nodes.monitoring import events
from nodes.monitoring.evaluate import evaluate
from nodes.remediation import inbox
from nodes.remediation.decide import decide
from nodes.schedulers.base import SchedulerError
from nodes.tasks import health
from portal.models import AuditEntry
from tests.lab import sysadmin
from tests.nodes.remediation.cluster import NAMES, Lab

pytestmark = pytest.mark.django_db


def test_a_gpu_that_fell_off_the_bus_drains_its_node_once(lab: Lab) -> None:
    lab.xid(79)
    lab.step()
    assert lab.scheduler.drained == {"dgx-01": "[node] Xid 79 on GPU 0 (vigil: off-bus)"}
    entry = lab.entry()
    assert (entry.state, entry.decision, entry.severity, entry.count) == ("open", "automatic", "fatal", 1)
    assert (entry.order.state, entry.order.asked_by) == ("done", None)  # type: ignore[union-attr]
    (audit,) = AuditEntry.objects.all()
    assert (audit.user, audit.action, audit.thing) == (None, "drain", "dgx-01")
    lab.xid(79)
    lab.happens("gpu.lost", gpu=lab.machine().gpus[0], since=time.time() - 60)
    lab.step()
    lab.step()
    assert NodeOrder.objects.count() == 1, "with the Xid and without it, it is one finding and one drain"
    assert lab.entry().count == 2


def test_a_lost_gpu_without_an_xid_drains_after_its_time(lab: Lab) -> None:
    lab.happens("gpu.lost", gpu=lab.machine().gpus[1], since=time.time())
    lab.step()
    assert lab.entry().state == "watching"
    assert not lab.scheduler.drained
    HealthEntry.objects.update(due_at=None)
    entry = lab.entry()
    entry.progress["holding"] = [[number, since - 30] for number, since in entry.progress["holding"]]
    entry.save()
    lab.step()
    assert lab.scheduler.drained == {"dgx-01": "[node] GPU fell off the bus on GPU 1 (vigil: off-bus)"}


def test_proposes_where_the_site_does_not_let_it_act(lab: Lab, settings: Any) -> None:
    settings.VIGIL_HEALTH = "propose"
    lab.xid(79)
    lab.step()
    entry = lab.entry()
    assert (entry.decision, entry.order) == ("proposed", None)
    assert "VIGIL_HEALTH=propose" in entry.held_back
    ops = sysadmin("ops")
    inbox.approve(ops, entry.pk, "looks right")
    lab.step()
    assert lab.scheduler.drained == {"dgx-01": "[node] Xid 79 on GPU 0: off-bus (vigil: ops)"}
    assert lab.entry().decision == "approved"
    assert inbox.approve(ops, entry.pk, "twice").order == lab.entry().order


def test_old_evidence_is_proposed_and_never_acted_on(lab: Lab) -> None:
    lab.xid(79, ago=1200)
    lab.step()
    assert (lab.entry().decision, lab.entry().is_late) == ("proposed", True)
    assert not lab.scheduler.drained


def test_harmless_errors_drain_nothing(lab: Lab) -> None:
    for code in (13, 31, 43, 45, 63, 94):
        lab.xid(code)
    lab.happens("boot", booted_at=time.time())
    lab.step()
    assert not NodeOrder.objects.exists()
    assert not HealthEntry.objects.open().exclude(action="ignore").exists()


def test_a_cluster_that_boots_at_once_is_judged_in_batches(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "MAX_REPAIRED", 2)
    for node in NAMES[:5]:
        lab.xid(109, node, ago=60)
    lab.step()
    for node in NAMES[:5]:
        lab.happens("boot", node, booted_at=time.time())
    lab.step()
    assert not NodeEvent.objects.filter(events.UNJUDGED).exists(), "all of them in one evaluation"
    lab.later(6)
    entries = HealthEntry.objects.filter(rule="context-switch-timeout")
    assert [entry.state for entry in entries] == ["cleared"] * 5


def test_a_drain_by_a_person_is_neither_replaced_nor_undone(lab: Lab) -> None:
    lab.scheduler.drain("dgx-01", "broken fan")
    lab.step()
    lab.xid(79)
    lab.step()
    assert lab.scheduler.drained["dgx-01"] == "broken fan"
    assert (lab.entry().decision, lab.entry().order) == ("proposed", None)
    assert "broken fan" in lab.entry().held_back


def test_a_rule_on_many_nodes_trips_the_breaker_until_a_person_resets_it(lab: Lab) -> None:
    for node in NAMES[:5]:
        lab.xid(79, node)
    lab.step()
    control = HealthControl.objects.get()
    assert control.tripped_by == "off-bus"
    assert not lab.scheduler.drained
    assert {entry.decision for entry in HealthEntry.objects.all()} == {"proposed"}
    lab.xid(79, NAMES[8])
    lab.step()
    assert not lab.scheduler.drained, "nothing is done automatically until a person resets it"
    inbox.reset_breaker(sysadmin("ops"), "a switch was rebooted")
    lab.xid(79, NAMES[9])
    lab.step()
    assert list(lab.scheduler.drained) == [NAMES[9]]


def test_a_failure_that_is_reported_late_trips_the_breaker(lab: Lab) -> None:
    """The portal was stopped for an upgrade while half the cluster was hit."""
    for node in NAMES[:5]:
        lab.xid(79, node, ago=300)
    lab.step()
    assert HealthControl.objects.get().tripped_by == "off-bus"
    assert not lab.scheduler.drained


def test_a_partitions_limit_holds_while_the_partitions_cannot_be_read(lab: Lab) -> None:
    for node in NAMES[1:3]:
        lab.scheduler.drain(node, "broken fan")
    Partition.objects.all().delete()
    sync.read(lab.scheduler, Reading.Part.NODES)
    lab.xid(79)
    lab.step()
    assert NAMES[0] not in lab.scheduler.drained
    assert "2 of 12 nodes of gpu are out of service" in lab.entry().held_back


def test_nodes_that_are_not_set_up_yet_are_not_out_of_service(lab: Lab) -> None:
    machines = lab.scheduler.machines
    lab.scheduler.machines = [replace(m, state="future") if m.name in NAMES[8:] else m for m in machines]
    sync.read(lab.scheduler, Reading.Part.NODES)
    lab.xid(79)
    lab.step()
    assert list(lab.scheduler.drained) == [NAMES[0]], lab.entry().held_back


def test_a_pass_ends_with_its_budget_and_the_next_pass_continues(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nodes.remediation.decide.BUDGET_S", 0.0)
    for node in NAMES[:2]:
        lab.xid(79, node)
    evaluate()
    for decided in (1, 2):
        decide()
        assert HealthEntry.objects.open().exclude(decision="").count() == decided


def test_refusals_read_the_nodes_once(lab: Lab) -> None:
    lab.xid(79)
    lab.step()
    for number in range(20):
        HealthEntry.objects.create(
            node=NAMES[1 + number % 11], item=str(number), rule=f"rule-{number}", state="open", severity="fatal",
            action="drain", first_seen=timezone.now(), last_seen=timezone.now(), opened_at=timezone.now(),
        )  # fmt: skip
    with CaptureQueriesContext(connection) as queries:
        decide()
    assert HealthEntry.objects.waiting().count() == 20
    assert sum('"nodes_hotspare"' in query["sql"] for query in queries) == 1


def test_limits_hold_over_an_hour(lab: Lab) -> None:
    """Only one of twelve nodes may be drained per hour; the second is proposed with the reason."""
    lab.xid(79, "dgx-01")
    lab.step()
    lab.xid(79, "dgx-02")
    lab.step()
    assert list(lab.scheduler.drained) == ["dgx-01"]
    assert lab.entry(node="dgx-02").held_back == "Vigil has drained 1 of at most 1 nodes in the last hour."


def test_a_second_rule_joins_the_drain_whatever_the_limits(lab: Lab) -> None:
    lab.xid(79)
    lab.step()
    NodeOrder.objects.update(asked_at=F("asked_at") - timedelta(hours=2))
    NodeOrder.objects.create(node="dgx-02", action="drain", rule="off-bus", state="done")
    NodeOrder.objects.create(node="dgx-01", action="undrain", rule="off-bus", state="refused", ended_at=timezone.now())
    lab.xid(119)
    lab.step()
    entry = HealthEntry.objects.open().exclude(rule="off-bus").get()
    assert (entry.decision, entry.order) == ("automatic", lab.entry().order)


def test_a_drain_is_retried_while_the_scheduler_refuses_or_is_away_and_done_once(lab: Lab) -> None:
    lab.scheduler.broken_parts["drain"] = SchedulerError("no answer")
    lab.xid(79)
    lab.step()
    assert lab.entry().order.state == "asked"  # type: ignore[union-attr]
    del lab.scheduler.broken_parts["drain"]
    NodeOrder.objects.update(tried_at=None)
    lab.step()
    assert list(lab.scheduler.drained) == ["dgx-01"]
    assert NodeOrder.objects.count() == 1


def test_an_event_is_judged_once_and_its_later_counts_too(lab: Lab) -> None:
    lab.xid(79)
    lab.step()
    assert NodeEvent.objects.get().judged == 1
    decide()
    lab.step()
    assert (lab.entry().count, HealthEntry.objects.count()) == (1, 1)


def test_what_a_person_cleared_stays_cleared_and_a_new_event_counts(lab: Lab) -> None:
    lab.xid(79)
    lab.step()
    ops = sysadmin("ops")
    inbox.clear(ops, lab.entry().pk, "reseated")
    lab.step()
    assert not HealthEntry.objects.active().exists()
    lab.xid(79, ago=-1, text="again")
    lab.step()
    again = HealthEntry.objects.active().get()
    assert again.action == "replace", "the second time within 30 days"
    audit = AuditEntry.objects.filter(user=ops).get()
    assert (audit.action, audit.detail) == ("finding.cleared", "reseated")


def test_an_event_after_a_clear_counts_where_the_nodes_clock_is_behind(lab: Lab) -> None:
    lab.xid(79)
    lab.step()
    inbox.clear(sysadmin("ops"), lab.entry().pk, "reseated")
    lab.step()
    HealthEntry.objects.update(cleared_at=F("cleared_at") - timedelta(seconds=20))
    cleared = lab.entry()
    cleared.progress["cleared_at"] -= 20
    cleared.save()
    machine, behind = lab.machine(), time.time() - 45
    machine.post(machine.event("xid", behind - 5, xid=79, seq=99, text="again", gpu=machine.gpus[0]), sent_at=behind)
    lab.step()
    assert HealthEntry.objects.active().get(rule="off-bus").state == "open"
    assert list(lab.scheduler.drained) == ["dgx-01"]


def test_a_dismissed_entry_stays_so_while_it_lasts(lab: Lab, settings: Any) -> None:
    settings.VIGIL_HEALTH = "propose"
    lab.xid(79)
    lab.step()
    inbox.dismiss(sysadmin("ops"), lab.entry().pk, "ticket 4711")
    settings.VIGIL_HEALTH = "act"
    lab.xid(79)
    lab.step()
    assert (lab.entry().state, lab.entry().count) == ("dismissed", 2)
    assert not lab.scheduler.drained


def test_an_order_of_a_person_that_waits_is_not_replaced(lab: Lab) -> None:
    lab.machine()
    ops = sysadmin("ops")
    drain.request_order(ops, Node.objects.get(name="dgx-01"), NodeOrder.Action.UNDRAIN)
    lab.xid(79)
    lab.step()
    assert not lab.scheduler.drained
    assert lab.entry().held_back == "ops has just ordered to undrain dgx-01."


def test_a_new_event_right_after_an_undrain_drains_again(lab: Lab) -> None:
    """The rows still show the drain that was just ended: it must not be taken for somebody else's."""
    lab.xid(79)
    lab.step()
    inbox.clear(sysadmin("ops"), lab.entry().pk, "reseated")
    health()
    drain.carry_out(lab.scheduler)
    assert not lab.scheduler.drained
    assert Node.objects.get(name="dgx-01").state == "drained", "not read again yet"
    lab.xid(79, "dgx-01", ago=-1, text="again")
    HealthControl.objects.update(reset_at=None)
    lab.step()
    assert list(lab.scheduler.drained) == ["dgx-01"]


def test_a_new_event_before_the_undrain_is_sent_replaces_it(lab: Lab) -> None:
    lab.xid(79)
    lab.step()
    inbox.clear(sysadmin("ops"), lab.entry().pk, "reseated")
    health()
    assert NodeOrder.objects.open().get().action == "undrain"
    lab.xid(79, ago=-1, text="again")
    lab.step()
    assert list(lab.scheduler.drained) == ["dgx-01"]
    assert HealthEntry.objects.active().get().decision == "automatic"


def test_a_return_that_was_not_sent_is_withdrawn_where_vigil_may_not_drain(lab: Lab) -> None:
    """The scheduler was away, so the node never left its drain: there is nothing to decide."""
    lab.xid(79)
    lab.step()
    inbox.clear(sysadmin("ops"), lab.entry().pk, "reseated")
    health()
    drain.note_outage(SchedulerError("slurmctld restarts"))
    lab.scheduler.broken_parts["nodes"] = SchedulerError("slurmctld restarts")
    NodeOrder.objects.update(tried_at=F("tried_at") - drain.AGAIN)
    drain.carry_out(lab.scheduler)
    assert NodeOrder.objects.open().get().action == "undrain"
    HealthControl.objects.update(tripped_at=timezone.now(), tripped_detail="A switch.")
    lab.xid(79, ago=-1, text="again")
    health()
    entry = HealthEntry.objects.active().get()
    assert (entry.decision, entry.order) == ("automatic", NodeOrder.objects.get(state="done"))
    assert not NodeOrder.objects.open().exists()


def test_an_order_that_no_worker_carried_out_waits_for_a_person(lab: Lab) -> None:
    lab.xid(79)
    health()
    NodeOrder.objects.update(asked_at=F("asked_at") - drain.GIVE_UP)
    lab.step()
    assert not lab.scheduler.drained, "no old order is replayed after a restart"
    lab.step()
    entry = lab.entry()
    assert entry.decision == "proposed"
    assert entry.held_back.startswith("Its order was refused: Vigil did not get to it within 10 min.")
    inbox.approve(sysadmin("ops"), entry.pk, "still broken")
    lab.step()
    assert list(lab.scheduler.drained) == ["dgx-01"]


def test_a_step_that_fails_stops_no_other(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> None:
        raise ValueError("a bad record")

    monkeypatch.setattr(maintenance, "advance", fails)
    lab.xid(79)
    with pytest.raises(ExceptionGroup, match="Some steps of health failed"):
        health()
    assert NodeOrder.objects.open().get().node == "dgx-01"


def test_waits_for_the_scheduler_to_name_a_node_that_has_just_reported(lab: Lab) -> None:
    """A portal that has just started hears of an Xid before it has read the nodes."""
    Node.objects.filter(name="dgx-01").delete()
    lab.xid(79)
    health()
    assert (lab.entry().state, lab.entry().decision) == ("open", "")
    lab.step()  # reads the nodes
    lab.step()
    assert lab.entry().decision == "automatic"
    assert "dgx-01" in lab.scheduler.drained


def test_proposes_for_a_node_that_the_scheduler_does_not_name(lab: Lab) -> None:
    Node.objects.filter(name="dgx-01").delete()
    lab.xid(79, ago=180)
    health()
    assert (lab.entry().decision, lab.entry().held_back) == ("proposed", "The scheduler does not know this node.")


def test_a_drain_for_a_grave_finding_goes_before_those_of_many_nodes(
    lab: Lab, settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings.VIGIL_HEALTH = "propose"
    lab.xid(79)
    lab.step()
    ops = sysadmin("ops")
    bulk.drain_all(ops, "dgx-[02-09]", "new switch")
    inbox.approve(ops, lab.entry().pk, "board ordered")
    monkeypatch.setattr(drain, "BUDGET_S", -1)  # time for one order
    drain.carry_out(lab.scheduler)
    assert list(lab.scheduler.drained) == ["dgx-01"]
