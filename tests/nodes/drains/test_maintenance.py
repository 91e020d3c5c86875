"""Maintenance windows drain and return their nodes at their times, and keep health rules from acting meanwhile."""

from __future__ import annotations

import sys
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from django.utils import timezone

from nodes.cluster import drain, sync
from nodes.drains import maintenance, reservations
from nodes.models import HealthControl, HealthEntry, MaintenanceWindow, Node, NodeOrder, Reading
from nodes.remediation import inbox
from nodes.schedulers.base import SchedulerError
from portal.models import AuditEntry, User
from tests.lab import a_project, bearer, person, signed_in, sysadmin
from tests.nodes.remediation.cluster import Lab

pytestmark = pytest.mark.django_db
HOUR = timedelta(hours=1)


@pytest.fixture
def lab(settings: Any) -> Lab:
    settings.VIGIL_HEALTH = "act"
    return Lab()


@pytest.fixture
def ops() -> User:
    return sysadmin("ops")


def now() -> datetime:
    return datetime.now(UTC)


def planned(ops: User, nodes: str = "dgx-[01-02]", *, starts: float = -1, ends: float = 60, **more: Any) -> Any:
    """Plan a window, in minutes from now."""
    times = (now() + timedelta(minutes=minutes) for minutes in (starts, ends))
    return maintenance.plan(ops, nodes, more.pop("reason", "new switch"), *times, **more)


def at(lab: Lab, minutes: float = 0) -> None:
    """Let the workers do what is due so many minutes from now."""
    maintenance.advance(now() + timedelta(minutes=minutes))
    drain.carry_out(lab.scheduler)
    sync.read(lab.scheduler, Reading.Part.NODES)


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


def test_a_node_whose_earlier_drain_a_person_ends_meanwhile_stays_in_service(lab: Lab, ops: User) -> None:
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
        "plan maintenance", "cancel maintenance",
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
    assert window.state == "ended"


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


def test_a_cancelled_window_whose_process_is_killed_is_ended_by_a_worker(
    lab: Lab, ops: User, monkeypatch: pytest.MonkeyPatch
) -> None:
    window = planned(ops)
    at(lab)
    monkeypatch.setattr(maintenance, "_end", lambda *_: sys.exit())
    with pytest.raises(SystemExit):
        maintenance.cancel(ops, window)
    monkeypatch.undo()
    at(lab)
    assert not lab.scheduler.drained
    assert AuditEntry.objects.filter(action="cancel maintenance").count() == 1


def test_reserves_where_requested_and_removes_it(lab: Lab, ops: User) -> None:
    window = planned(ops, starts=10, wants_reservation=True)
    reservations.carry_out(lab.scheduler)
    reservations.carry_out(lab.scheduler)
    (created,) = lab.scheduler.reserved
    assert (created.nodes, lab.scheduler.asked.count("reserve_window")) == (("dgx-01", "dgx-02"), 1)
    at(lab, 11)
    assert not lab.scheduler.drained, "the reservation does it"
    maintenance.cancel(ops, window)
    reservations.carry_out(lab.scheduler)
    assert not lab.scheduler.reserved


def test_a_window_cancelled_while_it_was_reserved_is_removed_at_once(
    lab: Lab, ops: User, monkeypatch: pytest.MonkeyPatch
) -> None:
    window = planned(ops, starts=10, wants_reservation=True)
    reserve = lab.scheduler.reserve_window

    def reserve_slowly(*args: Any, **more: Any) -> None:
        maintenance.cancel(ops, window)
        reserve(*args, **more)

    monkeypatch.setattr(lab.scheduler, "reserve_window", reserve_slowly)
    reservations.carry_out(lab.scheduler)
    assert lab.scheduler.reserved
    reservations.carry_out(lab.scheduler)
    assert not lab.scheduler.reserved


def test_a_reservation_that_somebody_deleted_is_made_again(lab: Lab, ops: User) -> None:
    window = planned(ops, wants_reservation=True)
    reservations.carry_out(lab.scheduler)
    lab.scheduler.reserved.clear()
    sync.read(lab.scheduler, Reading.Part.RESERVATIONS)
    reservations.carry_out(lab.scheduler)
    assert not lab.scheduler.reserved, "the reading may have begun before it was made"
    MaintenanceWindow.objects.update(tried_at=timezone.now() - HOUR)
    lab.scheduler.broken_parts["reserve_window"] = SchedulerError("no answer")
    reservations.carry_out(lab.scheduler)
    window.refresh_from_db()
    assert (window.reservation, window.problem) == ("", "no answer")
    at(lab)
    assert set(lab.scheduler.drained) == {"dgx-01", "dgx-02"}, "no job starts there meanwhile"
    del lab.scheduler.broken_parts["reserve_window"]
    MaintenanceWindow.objects.update(tried_at=timezone.now() - HOUR)
    reservations.carry_out(lab.scheduler)
    assert len(lab.scheduler.reserved) == 1
    sync.read(lab.scheduler, Reading.Part.RESERVATIONS)
    MaintenanceWindow.objects.update(tried_at=timezone.now() - HOUR)
    reservations.carry_out(lab.scheduler)
    assert lab.scheduler.asked.count("reserve_window") == 3, "it is listed again"


def test_a_reservation_that_the_scheduler_drops_at_its_end_is_not_made_again(lab: Lab, ops: User) -> None:
    planned(ops, ends=0.5, wants_reservation=True)
    reservations.carry_out(lab.scheduler)
    lab.scheduler.reserved.clear()
    sync.read(lab.scheduler, Reading.Part.RESERVATIONS)
    MaintenanceWindow.objects.update(tried_at=timezone.now() - HOUR)
    reservations.carry_out(lab.scheduler)
    assert not lab.scheduler.reserved


def test_killed_between_the_reservation_and_its_record_makes_one(lab: Lab, ops: User) -> None:
    planned(ops, wants_reservation=True)
    reservations.carry_out(lab.scheduler)
    MaintenanceWindow.objects.update(reservation="")
    reservations.carry_out(lab.scheduler)
    assert len(lab.scheduler.reserved) == 1


def test_a_reservation_that_nothing_confirmed_is_removed_with_its_window(
    lab: Lab, ops: User, monkeypatch: pytest.MonkeyPatch
) -> None:
    window = planned(ops, starts=10, wants_reservation=True)
    reserve = lab.scheduler.reserve_window

    def time_out(*args: Any, **more: Any) -> None:
        reserve(*args, **more)
        raise SchedulerError("no answer within 10 s")

    monkeypatch.setattr(lab.scheduler, "reserve_window", time_out)
    reservations.carry_out(lab.scheduler)
    maintenance.cancel(ops, window)
    MaintenanceWindow.objects.update(tried_at=timezone.now() - reservations.AGAIN)
    reservations.carry_out(lab.scheduler)
    assert not lab.scheduler.reserved
    reservations.carry_out(lab.scheduler)
    assert lab.scheduler.asked.count("unreserve") == 1


def test_drains_its_nodes_while_the_scheduler_fails_to_reserve_them(lab: Lab, ops: User) -> None:
    planned(ops, wants_reservation=True)
    lab.scheduler.broken_parts["reserve_window"] = SchedulerError("no answer")
    reservations.carry_out(lab.scheduler)
    at(lab)
    assert set(lab.scheduler.drained) == {"dgx-01", "dgx-02"}
    at(lab, 61)
    assert not lab.scheduler.drained


def test_a_scheduler_that_refuses_or_is_away(lab: Lab, ops: User) -> None:
    window = planned(ops, wants_reservation=True)
    lab.scheduler.broken_parts["reserve_window"] = SchedulerError("no answer")
    reservations.carry_out(lab.scheduler)
    reservations.carry_out(lab.scheduler)
    assert lab.scheduler.asked.count("reserve_window") == 1, "not at every tick"
    MaintenanceWindow.objects.update(tried_at=None)
    lab.scheduler.broken_parts["reserve_window"] = SchedulerError("no right to do so", permanent=True)
    reservations.carry_out(lab.scheduler)
    window.refresh_from_db()
    assert window.problem == "Not reserved: no right to do so Vigil drains the nodes instead."
    at(lab)
    at(lab)
    assert set(lab.scheduler.drained) == {"dgx-01", "dgx-02"}


def post(user: User, address: str = "", **body: Any) -> Any:
    client = bearer(user, "admin" if user.is_sysadmin else "submit")
    return client.post(f"/api/v1/maintenance{address}", body, content_type="application/json")


def wanted(**changes: Any) -> dict[str, Any]:
    times = {"starts_at": (now() + HOUR).isoformat(), "ends_at": (now() + 2 * HOUR).isoformat()}
    return {"nodes": "dgx-[01-02]", "reason": "new switch", **times, **changes}


def test_rest_plans_lists_and_cancels(lab: Lab, ops: User) -> None:
    answer = post(ops, **wanted(reserve=True))
    assert answer.status_code == 201
    window = answer.json()
    assert (window["nodes"], window["state"], window["planned_by"]) == (["dgx-01", "dgx-02"], "planned", "ops")
    ada = person("ada", a_project())
    assert [item["id"] for item in bearer(ada, "read").get("/api/v1/maintenance").json()["items"]] == [window["id"]]
    assert post(ada, **wanted()).status_code == 403
    assert post(ada, f"/{window['id']}/cancel").status_code == 403
    assert post(ops, f"/{window['id']}/cancel").json()["state"] == "cancelled"
    again = post(ops, f"/{window['id']}/cancel")
    assert (again.status_code, again.json()["detail"]) == (409, f"Maintenance window {window['id']} is over already.")
    assert post(ops, "/999/cancel").status_code == 404
    assert bearer(ada, "read").get("/api/v1/maintenance").json()["items"] == []
    assert len(bearer(ada, "read").get("/api/v1/maintenance", {"all": True}).json()["items"]) == 1


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"ends_at": "2020-01-01T00:00:00Z"}, "ends_at"),
        ({"starts_at": "2999-01-01T00:00:00Z", "ends_at": "2999-01-02T00:00:00Z"}, "starts_at"),
        ({"ends_at": "2999-01-01T00:00:00Z"}, "ends_at"),
        ({"nodes": "dgx-99"}, "nodes"),
        ({"nodes": "n[1-999999999]"}, "nodes"),
        ({"reason": " "}, "reason"),
        ({"reason": "x" * 151}, "reason"),
    ],
)
def test_refuses_what_cannot_be_planned(lab: Lab, ops: User, changes: dict[str, Any], field: str) -> None:
    answer = post(ops, **wanted(**changes))
    assert answer.status_code == 422
    assert answer.json()["errors"][0]["field"] == field
    assert not MaintenanceWindow.objects.exists()


def test_the_page_plans_and_cancels(lab: Lab, ops: User) -> None:
    client = signed_in(ops)
    starts, ends = ((now() + hours * HOUR).strftime("%Y-%m-%dT%H:%M") for hours in (24, 26))
    sent = {"nodes": "dgx-[01-02]", "reason": "<b>switch</b>", "starts_at": starts, "ends_at": ends}
    assert client.post("/maintenance", {**sent, "ends_at": "soon"}).status_code == 422
    assert client.post("/maintenance", sent).status_code == 302
    for page in ("/maintenance", "/drains", "/nodes/dgx-01"):
        assert "&lt;b&gt;switch&lt;/b&gt;" in client.get(page).text
    window = MaintenanceWindow.objects.get()
    ada = signed_in(person("ada", a_project()))
    assert "Plan maintenance" not in ada.get("/maintenance").text
    assert ada.post("/maintenance", sent).status_code == 403
    assert ada.post(f"/maintenance/{window.pk}/cancel").status_code == 403
    assert client.post(f"/maintenance/{window.pk}/cancel").status_code == 302
    assert "No maintenance is planned." in client.get("/maintenance").text


def test_the_dry_run_warns_of_a_window_that_the_job_reaches_into(lab: Lab, ops: User) -> None:
    mira = person("mira", a_project())
    spec = """
name = "wren"
kind = "distributed"
project = "default"
[resources]
time_limit = "04:00:00"
[run]
recipe = "language"
steps = 10
"""

    def warned() -> list[str]:
        answer = bearer(mira, "submit").post("/api/v1/jobs/check", spec, content_type="application/toml").json()
        return [finding["text"] for finding in answer["findings"] if finding["title"] == "Maintenance"]

    planned(ops, starts=300, ends=400)
    assert warned() == []
    planned(ops, "dgx-[01-12]", starts=60, ends=120, reason="new driver", wants_reservation=True)
    (text,) = warned()
    assert text.startswith("Maintenance begins on all 12 nodes that it could use (dgx-01 … dgx-12) at ")
    assert text.endswith("so it starts there only afterwards.")


@pytest.mark.parametrize("starts_at", ["0001-01-01T00:00", "1600-02-29T12:00", "9999-12-31T23:59"])
def test_times_that_no_calendar_needs_are_refused(lab: Lab, ops: User, settings: Any, starts_at: str) -> None:
    settings.TIME_ZONE = "America/New_York"
    form = {"nodes": "dgx-01", "reason": "fans", "starts_at": starts_at, "ends_at": "9999-12-31T23:59"}
    for ends_at in (form["ends_at"], f"{now() + HOUR:%Y-%m-%dT%H:%M}"):
        assert signed_in(ops).post("/maintenance", form | {"ends_at": ends_at}).status_code == 422
    body = {"nodes": "dgx-01", "reason": "fans", "starts_at": f"{starts_at}Z", "ends_at": (now() + HOUR).isoformat()}
    answer = bearer(ops, "admin").post("/api/v1/maintenance", body, content_type="application/json")
    assert answer.status_code == 422
    assert not MaintenanceWindow.objects.exists()
