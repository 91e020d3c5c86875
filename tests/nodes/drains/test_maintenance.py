"""Maintenance windows drain and return their nodes at their times, and keep health rules from acting meanwhile."""

from __future__ import annotations

import sys
from datetime import timedelta

import pytest
from django.utils import timezone

from nodes.cluster import drain, sync
from nodes.drains import maintenance
from nodes.models import HealthControl, HealthEntry, MaintenanceWindow, Node, NodeOrder, Reading
from nodes.remediation import inbox
from nodes.schedulers.base import SchedulerError
from portal.models import AuditEntry, User
from tests.lab import bearer, signed_in
from tests.nodes.drains.windows import at, planned
from tests.nodes.remediation.cluster import Lab

pytestmark = pytest.mark.django_db


def test_drains_at_the_start_and_returns_at_the_end(lab: Lab, ops: User) -> None:
    window = planned(ops, starts=10)
    at(lab)
    assert not lab.scheduler.drained
    at(lab, 11)
    reason = f"[node] new switch (vigil: maintenance-{window.pk})"
    assert lab.scheduler.drained == {"dgx-01": reason, "dgx-02": reason}
    at(lab, 12)
    assert NodeOrder.objects.count() == 2, "nothing is drained twice"
    at(lab, 61)
    assert not lab.scheduler.drained
    window.refresh_from_db()
    assert window.state == "ended"
    at(lab, 62)
    assert NodeOrder.objects.count() == 4


def test_leaves_alone_what_a_person_drained_before_and_meanwhile(lab: Lab, ops: User) -> None:
    lab.scheduler.drain("dgx-01", "broken fan")
    sync.read(lab.scheduler, Reading.Part.NODES)
    planned(ops)
    at(lab)
    assert lab.scheduler.drained["dgx-01"] == "broken fan"
    lab.scheduler.drain("dgx-02", "mine now")
    sync.read(lab.scheduler, Reading.Part.NODES)
    at(lab, 61)
    assert lab.scheduler.drained == {"dgx-01": "broken fan", "dgx-02": "mine now"}


def test_a_node_that_a_person_undrained_meanwhile_stays_so(lab: Lab, ops: User) -> None:
    planned(ops)
    at(lab)
    node = Node.objects.get(name="dgx-01")
    drain.request_order(ops, node, NodeOrder.Action.UNDRAIN, replaces=node.reason)
    at(lab, 1)
    at(lab, 2)
    assert list(lab.scheduler.drained) == ["dgx-02"]


def test_a_node_stays_in_service_if_a_person_ends_its_earlier_drain_meanwhile(lab: Lab, ops: User) -> None:
    for name in ("dgx-01", "dgx-02"):
        lab.scheduler.drain(name, "broken fan")
    sync.read(lab.scheduler, Reading.Part.NODES)
    before, after = Node.objects.order_by("name")[:2]
    drain.request_order(ops, before, NodeOrder.Action.UNDRAIN, replaces="broken fan")
    planned(ops)
    drain.request_order(ops, after, NodeOrder.Action.UNDRAIN, replaces="broken fan")
    for _ in range(3):
        at(lab)
    assert list(lab.scheduler.drained) == ["dgx-01"], "that one was undrained before there was a window"


@pytest.mark.parametrize("call", ["drain", "undrain"])
def test_what_the_scheduler_does_not_carry_out_is_ordered_again(lab: Lab, ops: User, call: str) -> None:
    planned(ops, ends=60)
    if call == "undrain":
        at(lab)
    lab.scheduler.broken_parts[call] = SchedulerError("no answer", permanent=True)
    at(lab, 61 if call == "undrain" else 0)
    del lab.scheduler.broken_parts[call]
    at(lab)
    assert len(lab.scheduler.drained) == (2 if call == "undrain" else 0), "not at once"
    earlier = timezone.now() - drain.GIVE_UP - timedelta(minutes=1)
    NodeOrder.objects.filter(state="refused").update(asked_at=earlier, ended_at=earlier)
    at(lab)
    assert len(lab.scheduler.drained) == (0 if call == "undrain" else 2)
    count = NodeOrder.objects.count()
    at(lab)
    assert NodeOrder.objects.count() == count


def test_overlapping_windows_pass_a_node_on(lab: Lab, ops: User) -> None:
    planned(ops, ends=60)
    second = planned(ops, "dgx-[02-03]", ends=120, reason="new driver")
    at(lab)
    at(lab, 61)
    reason = f"[node] new driver (vigil: maintenance-{second.pk})"
    assert lab.scheduler.drained == {"dgx-02": reason, "dgx-03": reason}
    at(lab, 121)
    assert not lab.scheduler.drained


def test_cancelling_returns_what_it_drained(lab: Lab, ops: User) -> None:
    window = planned(ops)
    at(lab)
    assert maintenance.cancel(ops, window)
    at(lab)
    assert not lab.scheduler.drained
    assert not maintenance.cancel(ops, window)
    assert [entry.action for entry in AuditEntry.objects.filter(user=ops).order_by("pk")] == [
        "maintenance.planned", "maintenance.cancelled",
    ]  # fmt: skip


def test_cancelled_before_the_scheduler_answered_drains_nothing(lab: Lab, ops: User) -> None:
    window = planned(ops)
    maintenance.advance()
    maintenance.cancel(ops, window)
    at(lab)
    assert not lab.scheduler.drained
    assert {order.state for order in NodeOrder.objects.all()} == {"refused"}


def test_cancelled_while_the_scheduler_answered_drains_nothing_for_long(
    lab: Lab, ops: User, monkeypatch: pytest.MonkeyPatch
) -> None:
    window = planned(ops)
    maintenance.advance()
    send = lab.scheduler.drain

    def send_slowly(node: str, reason: str) -> None:
        maintenance.cancel(ops, window)
        send(node, reason)

    monkeypatch.setattr(lab.scheduler, "drain", send_slowly)
    at(lab)
    assert list(lab.scheduler.drained) == ["dgx-01"], "the others are not sent"
    at(lab)
    assert not lab.scheduler.drained


def test_cancelled_before_the_nodes_were_read_again_returns_them(lab: Lab, ops: User) -> None:
    window = planned(ops)
    maintenance.advance()
    drain.carry_out(lab.scheduler)
    assert set(lab.scheduler.drained) == {"dgx-01", "dgx-02"}
    assert maintenance.cancel(ops, window)
    assert not maintenance.cancel(ops, window), "it is over already"
    at(lab)
    at(lab)
    assert not lab.scheduler.drained
    window.refresh_from_db()
    assert window.state == "cancelled"


def test_a_window_that_ended_before_the_nodes_were_read_passes_them_on(lab: Lab, ops: User) -> None:
    first = planned(ops)
    maintenance.advance()
    drain.carry_out(lab.scheduler)
    second = planned(ops, reason="new driver", ends=120)
    maintenance.cancel(ops, first)
    at(lab)
    at(lab)
    reason = f"[node] new driver (vigil: maintenance-{second.pk})"
    assert lab.scheduler.drained == {"dgx-01": reason, "dgx-02": reason}


def test_a_window_that_passed_while_nothing_ran_is_over(lab: Lab, ops: User) -> None:
    window = planned(ops, starts=10, ends=20)
    at(lab, 600)
    window.refresh_from_db()
    assert (window.state, NodeOrder.objects.count()) == ("ended", 0)


def test_no_rule_acts_during_a_window_and_afterwards_it_does(lab: Lab, ops: User) -> None:
    window = planned(ops, wants_reservation=True)  # so the nodes are not drained
    lab.xid(79)
    lab.step()
    entry = lab.entry()
    assert (entry.decision, NodeOrder.objects.count()) == ("", 0)
    assert entry.held_back.startswith("In maintenance until")
    assert "In maintenance until" in signed_in(ops).get("/health").text
    maintenance.cancel(ops, window)
    lab.step()
    assert list(lab.scheduler.drained) == ["dgx-01"]


def test_work_on_a_rack_does_not_trip_the_breaker(lab: Lab, ops: User) -> None:
    planned(ops, "dgx-[01-06]", wants_reservation=True)
    for number in range(1, 6):
        lab.xid(79, f"dgx-{number:02}")
    lab.xid(79, "dgx-09")
    lab.step()
    assert list(lab.scheduler.drained) == ["dgx-09"]


def test_a_persons_order_that_was_refused_does_not_stop_the_return(lab: Lab, ops: User) -> None:
    window = planned(ops)
    at(lab)
    node = Node.objects.get(name="dgx-01")
    assert node.is_drained
    lab.scheduler.broken_parts["undrain"] = SchedulerError("Slurm is being upgraded", permanent=True)
    drain.request_order(ops, node, NodeOrder.Action.UNDRAIN, replaces=node.reason)
    lab.step()
    del lab.scheduler.broken_parts["undrain"]
    maintenance.cancel(ops, window)
    lab.step()
    assert not lab.scheduler.drained


def test_the_end_of_work_on_a_rack_does_not_trip_the_breaker(lab: Lab, ops: User) -> None:
    window = planned(ops, "dgx-[01-06]", wants_reservation=True)
    for number in range(1, 6):
        lab.xid(79, f"dgx-{number:02}")
    lab.step()
    maintenance.cancel(ops, window)
    lab.step()
    assert HealthControl.objects.get().tripped_at is None
    assert len(lab.scheduler.drained) == 1, "as many as the limit lets it drain in an hour"


def test_a_node_with_an_open_finding_stays_drained(lab: Lab, ops: User) -> None:
    window = planned(ops)
    at(lab)
    lab.xid(79)
    lab.step()
    at(lab, 61)
    assert list(lab.scheduler.drained) == ["dgx-01"]
    window.refresh_from_db()
    assert window.problem == "dgx-01 stayed drained: a finding of health rules is open."
    (drained,) = bearer(ops, "read").get("/api/v1/drains").json()["items"]
    assert (drained["holder"], drained["standing"]) == ("maintenance", "stands"), "it must not be returned"
    assert drained["advice"] == "It stays drained after its maintenance: repair it, then return it to service."
    inbox.clear(ops, HealthEntry.objects.get().pk, "reseated")
    lab.step()
    assert list(lab.scheduler.drained) == ["dgx-01"], "a person returns it: no rule had drained it"
    (item,) = bearer(ops, "read").get("/api/v1/drains").json()["items"]
    assert (item["holder"], item["standing"]) == ("maintenance", "over")


def test_a_window_does_not_replace_the_reason_of_a_rules_order(lab: Lab, ops: User) -> None:
    lab.xid(79)
    lab.scheduler.broken_parts["drain"] = SchedulerError("no answer")
    lab.step()
    planned(ops)
    maintenance.advance()
    del lab.scheduler.broken_parts["drain"]
    NodeOrder.objects.update(tried_at=None)
    at(lab)
    assert lab.scheduler.drained["dgx-01"] == "[node] Xid 79 on GPU 0 (vigil: off-bus)"


def test_a_worker_ends_a_cancelled_window_after_its_process_is_killed(
    lab: Lab, ops: User, monkeypatch: pytest.MonkeyPatch
) -> None:
    window = planned(ops)
    at(lab)
    monkeypatch.setattr(maintenance, "_end_if_possible", lambda *_: sys.exit())
    with pytest.raises(SystemExit):
        maintenance.cancel(ops, window)
    monkeypatch.undo()
    at(lab)
    assert not lab.scheduler.drained
    assert AuditEntry.objects.filter(action="maintenance.cancelled").count() == 1


def test_a_return_that_is_always_refused_is_not_repeated_for_more_than_a_day(lab: Lab, ops: User) -> None:
    window = planned(ops, "dgx-01")
    at(lab)
    lab.scheduler.broken_parts["undrain"] = SchedulerError("no answer", permanent=True)
    at(lab, 61)
    window.refresh_from_db()
    MaintenanceWindow.objects.update(ended_at=window.ended_at - timedelta(days=1, minutes=61))
    earlier = timezone.now() - drain.GIVE_UP - timedelta(minutes=1)
    NodeOrder.objects.filter(state="refused").update(asked_at=earlier, ended_at=earlier)
    at(lab)
    assert [order.action for order in NodeOrder.objects.all()] == ["undrain", "drain"]
