"""Test draining nodes: requested over REST, carried out by a tick, reported to whoever requested it."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from django.test import Client

from nodes.cluster import drain, sync
from nodes.models import Node, NodeOrder, Reading
from nodes.schedulers.base import SchedulerError
from portal.models import AuditEntry, User
from tests.jobs.schedulers import ScriptedScheduler
from tests.lab import bearer, person, signed_in, sysadmin

pytestmark = pytest.mark.django_db


@pytest.fixture
def scheduler() -> ScriptedScheduler:
    scheduler = ScriptedScheduler()
    sync.read(scheduler)
    return scheduler


def post(user: User, address: str, **body: Any) -> Any:
    client: Client = signed_in(user)
    return client.post(f"/api/v1/nodes/{address}", body, content_type="application/json")


def order_of(user: User, name: str = "dgx-01") -> Any:
    return signed_in(user).get(f"/api/v1/nodes/{name}").json()["order"]


def test_is_carried_out_by_the_next_tick(ops: User, scheduler: ScriptedScheduler) -> None:
    answer = post(ops, "dgx-01/drain", reason="XID 79 on GPU 5")
    assert answer.status_code == 202
    assert (answer.json()["state"], answer.json()["requested_by"]) == ("asked", "ops")
    assert not scheduler.drained, "no request calls the scheduler"
    drain.carry_out(scheduler)
    assert scheduler.drained == {"dgx-01": "XID 79 on GPU 5 (vigil: ops)"}
    assert sync.is_due(), "the page is to show it at once"
    sync.sync(scheduler)
    node = signed_in(ops).get("/api/v1/nodes/dgx-01").json()
    assert (node["state"], node["takes_jobs"], node["gpus_free"]) == ("drained", False, 0)
    assert (node["order"]["state"], node["order"]["outcome"]) == ("done", "")
    entry = AuditEntry.objects.get()
    assert (entry.user, entry.action, entry.thing, entry.detail) == (ops, "drain", "dgx-01", "XID 79 on GPU 5")

    assert post(ops, "dgx-01/undrain").status_code == 202
    drain.carry_out(scheduler)
    assert not scheduler.drained
    listed = signed_in(ops).get("/api/v1/nodes/dgx-01/orders?limit=1").json()
    assert [order["action"] for order in listed["items"]] == ["undrain"]
    assert listed["next"]


HAND = {"state": "drained", "reason": "ECC on gpu3, RMA 4711", "reason_by": "root"}


def by_hand(scheduler: ScriptedScheduler, **more: str) -> None:
    """Change the node as somebody's `scontrol update` or a health check does."""
    scheduler.machines = [replace(scheduler.machines[0], **(HAND | more))]
    sync.read(scheduler, Reading.Part.NODES)


@pytest.mark.parametrize("action", ["drain", "undrain"])
@pytest.mark.parametrize(("state", "words"), [("drained", "drained by"), ("down", "down, set by")])
def test_somebody_elses_drain_is_shown_and_not_replaced_unasked(
    ops: User, scheduler: ScriptedScheduler, action: str, state: str, words: str
) -> None:
    by_hand(scheduler, state=state)
    body = {"reason": "fan"} if action == "drain" else {}
    answer = post(ops, f"dgx-01/{action}", **body)
    assert answer.status_code == 409
    assert answer.json()["detail"].startswith(f"dgx-01 is {words} root: ECC on gpu3, RMA 4711. Send `replace`")
    assert post(ops, f"dgx-01/{action}", **body, replaces="fan 3").status_code == 409, "that is not its reason"
    assert not NodeOrder.objects.exists()
    confirmation = {"replaces": HAND["reason"]} if action == "drain" else {"replace": True}
    assert post(ops, f"dgx-01/{action}", **body, **confirmation).status_code == 202
    drain.carry_out(scheduler)
    assert order_of(ops)["state"] == "done"


def test_a_node_that_slurm_found_silent_is_drained_but_returned_only_if_confirmed(
    ops: User, scheduler: ScriptedScheduler
) -> None:
    by_hand(scheduler, state="down", reason="Not responding", reason_by="slurm")
    assert post(ops, "dgx-01/undrain").status_code == 409
    assert post(ops, "dgx-01/drain", reason="dead power supply").status_code == 202
    drain.carry_out(scheduler)
    assert scheduler.drained == {"dgx-01": "dead power supply (vigil: ops)"}


def test_a_drain_of_the_same_sysadmin_is_ended_without_a_question(ops: User, scheduler: ScriptedScheduler) -> None:
    post(ops, "dgx-01/drain", reason="fan")
    drain.carry_out(scheduler)
    sync.read(scheduler, Reading.Part.NODES)
    assert post(sysadmin("eva"), "dgx-01/undrain").status_code == 409, "another sysadmin's"
    assert post(ops, "dgx-01/undrain").status_code == 202


def test_a_drain_of_the_same_sysadmin_in_slurm_is_ended_without_a_question(
    ops: User, scheduler: ScriptedScheduler
) -> None:
    """Slurm's adapter takes the requester out of the reason again, and reports who that was."""
    post(ops, "dgx-01/drain", reason="fan")
    drain.carry_out(scheduler)
    scheduler.machines = [replace(scheduler.machines[0], reason="fan", reason_by="ops")]
    sync.read(scheduler, Reading.Part.NODES)
    assert post(sysadmin("eva"), "dgx-01/undrain").status_code == 409, "another sysadmin's"
    assert post(ops, "dgx-01/undrain").status_code == 202
    drain.carry_out(scheduler)
    assert order_of(ops)["state"] == "done"

    scheduler.machines = [replace(scheduler.machines[0], state="drained", reason="fan", reason_by="root")]
    sync.read(scheduler, Reading.Part.NODES)
    assert post(ops, "dgx-01/undrain").status_code == 409, "by hand, for the same reason"


def test_a_drain_by_hand_meanwhile_stays(ops: User, scheduler: ScriptedScheduler) -> None:
    """Slurm would overwrite one with the other: the current reason is checked before the scheduler is called."""
    assert post(ops, "dgx-01/drain", reason="fan").status_code == 202
    scheduler.machines = [replace(scheduler.machines[0], **HAND)]
    drain.carry_out(scheduler)
    assert order_of(ops)["state"] == "refused"
    assert "ECC on gpu3, RMA 4711" in order_of(ops)["outcome"]
    assert scheduler.requests.count("drain") == 0


def test_the_page_requires_confirmation_to_end_the_drain_of_somebody_else(
    ops: User, scheduler: ScriptedScheduler
) -> None:
    by_hand(scheduler)
    client = signed_in(ops)
    page = client.get("/nodes/dgx-01").text
    assert 'id="undrain"' in page
    assert "<b>ECC on gpu3, RMA 4711</b>" in page
    client.post("/nodes/dgx-01/undrain", {"replaces": "what stood there before"})
    assert not NodeOrder.objects.exists()
    client.post("/nodes/dgx-01/undrain", {"replaces": HAND["reason"]})
    assert NodeOrder.objects.get().action == "undrain"


@pytest.mark.parametrize(
    ("reason", "message"), [(" ", "Give a"), ("x" * 201, "at most 200"), ("fan\n3", "be one line")]
)
def test_an_unusable_reason_is_refused_with_what_would_work(
    ops: User, scheduler: ScriptedScheduler, reason: str, message: str
) -> None:
    answer = post(ops, "dgx-01/drain", reason=reason)
    assert answer.status_code == 422
    (error,) = answer.json()["errors"]
    assert error["field"] == "reason"
    assert message in error["message"]
    assert not NodeOrder.objects.exists()


def test_a_repeated_request_is_the_same_order_and_another_request_replaces_it(
    ops: User, scheduler: ScriptedScheduler
) -> None:
    first = post(ops, "dgx-01/drain", reason="fan").json()
    assert post(ops, "dgx-01/drain", reason=" fan ").json()["id"] == first["id"]
    assert AuditEntry.objects.count() == 1
    second = post(ops, "dgx-01/undrain").json()
    assert NodeOrder.objects.get(pk=first["id"]).state == "replaced"
    drain.carry_out(scheduler)
    assert NodeOrder.objects.get(pk=second["id"]).state == "done"
    assert scheduler.requests.count("drain") == 0


def test_another_persons_order_that_waits_is_replaced_only_if_confirmed(
    ops: User, scheduler: ScriptedScheduler
) -> None:
    post(ops, "dgx-01/drain", reason="water leak")
    eva = sysadmin("eva")
    for action, body in (("drain", {"reason": "new driver"}), ("undrain", {})):
        answer = post(eva, f"dgx-01/{action}", **body)
        assert (answer.status_code, answer.json()["type"]) == (409, "urn:vigil:problem:drained")
        assert answer.json()["detail"].startswith("ops has just ordered to drain dgx-01. Send `replace`")
    page = signed_in(eva).post("/nodes/dgx-01/drain", {"reason": "new driver"}, follow=True)
    assert "ops has just ordered to drain dgx-01. Nothing was changed." in page.text
    assert post(eva, "dgx-01/drain", reason="new driver", replace=True).status_code == 202
    drain.carry_out(scheduler)
    assert scheduler.drained == {"dgx-01": "new driver (vigil: eva)"}


@pytest.mark.parametrize("change", ["deleted", "demoted", "deactivated"])
def test_an_order_of_somebody_who_may_not_order_any_more_is_refused(
    ops: User, scheduler: ScriptedScheduler, change: str
) -> None:
    post(ops, "dgx-01/drain", reason="fan")
    if change == "deleted":
        ops.delete()
    else:
        User.objects.filter(pk=ops.pk).update(**{"is_superuser" if change == "demoted" else "is_active": False})
    drain.carry_out(scheduler)
    order = NodeOrder.objects.get()
    assert (order.state, scheduler.drained) == ("refused", {})
    outcomes = {"deleted": "The account of the person who ordered it was deleted. Order it again."}
    assert order.outcome == outcomes.get(change, "ops is no longer a sysadmin.")


def test_an_undrain_keeps_its_reason(ops: User, scheduler: ScriptedScheduler) -> None:
    post(ops, "dgx-01/drain", reason="fan")
    drain.carry_out(scheduler)
    sync.read(scheduler, Reading.Part.NODES)
    assert post(ops, "dgx-01/undrain", reason="new fan").json()["reason"] == "new fan"
    assert AuditEntry.objects.latest("id").detail == "new fan"
    assert post(ops, "dgx-01/undrain", reason="a\nb").status_code == 422


def test_what_the_scheduler_refuses_is_reported_in_its_words(ops: User, scheduler: ScriptedScheduler) -> None:
    scheduler.broken_parts["drain"] = SchedulerError("Invalid node name specified", permanent=True)
    post(ops, "dgx-01/drain", reason="fan")
    drain.carry_out(scheduler)
    assert order_of(ops)["state"] == "refused"
    assert order_of(ops)["outcome"] == "Invalid node name specified"


def test_a_silent_scheduler_is_tried_again_but_not_for_ever(ops: User, scheduler: ScriptedScheduler) -> None:
    scheduler.broken_parts["drain"] = SchedulerError("Slurm did not answer for 10 s.")
    post(ops, "dgx-01/drain", reason="fan")
    drain.carry_out(scheduler)
    drain.carry_out(scheduler)
    assert scheduler.requests.count("drain") == 1, "not at every tick"
    assert (order_of(ops)["state"], order_of(ops)["outcome"]) == ("asked", "Slurm did not answer for 10 s.")
    _age(drain.AGAIN)
    scheduler.broken_parts.clear()
    drain.carry_out(scheduler)
    assert order_of(ops)["state"] == "done"

    scheduler.broken_parts["drain"] = SchedulerError("Slurm did not answer for 10 s.")
    post(ops, "dgx-01/drain", reason="again")
    drain.carry_out(scheduler)
    _age(drain.GIVE_UP)
    drain.carry_out(scheduler)
    assert order_of(ops)["state"] == "refused"
    assert "Given up after 10 min" in order_of(ops)["outcome"]


def _age(by: timedelta) -> None:
    for order in NodeOrder.objects.all():
        NodeOrder.objects.filter(pk=order.pk).update(
            asked_at=order.asked_at - by, tried_at=order.tried_at and order.tried_at - by
        )


def test_an_order_that_was_replaced_while_others_were_sent_is_not_sent(
    ops: User, scheduler: ScriptedScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    drain.request_order(None, Node.objects.get(), NodeOrder.Action.DRAIN, "Xid 79", rule="off-bus")
    read = sync.read

    def read_slowly(*parts: Any) -> None:
        read(*parts)
        post(ops, "dgx-01/undrain")

    with monkeypatch.context() as patch:
        patch.setattr(sync, "read", read_slowly)
        drain.carry_out(scheduler)
    drain.carry_out(scheduler)
    assert (scheduler.requests.count("drain"), order_of(ops)["state"]) == (0, "done")


def test_an_order_that_was_replaced_while_it_was_sent_does_not_refuse_the_next(
    ops: User, scheduler: ScriptedScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = drain.request_order(None, Node.objects.get(), NodeOrder.Action.DRAIN, "Xid 79", rule="off-bus")
    send = scheduler.drain

    def send_slowly(node: str, reason: str) -> None:
        post(ops, "dgx-01/undrain")
        send(node, reason)

    monkeypatch.setattr(scheduler, "drain", send_slowly)
    drain.carry_out(scheduler)
    first.refresh_from_db()
    assert (first.state, list(scheduler.drained)) == ("done", ["dgx-01"]), "what happened is recorded"
    drain.carry_out(scheduler)
    assert (order_of(ops)["action"], order_of(ops)["state"], scheduler.drained) == ("undrain", "done", {})


def test_only_people_order_while_the_nodes_cannot_be_read(ops: User, scheduler: ScriptedScheduler) -> None:
    order = drain.request_order(None, Node.objects.get(), NodeOrder.Action.DRAIN, "Xid 79", rule="off-bus")
    scheduler.broken_parts["nodes"] = SchedulerError("no answer")
    drain.carry_out(scheduler)
    order.refresh_from_db()
    assert (order.state, order.outcome) == ("asked", "Not sent: The nodes could not be read: no answer")
    post(ops, "dgx-01/drain", reason="fan")
    drain.carry_out(scheduler)
    assert scheduler.drained == {"dgx-01": "fan (vigil: ops)"}


def test_a_slow_reading_of_the_nodes_leaves_time_for_an_order(
    ops: User, scheduler: ScriptedScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    post(ops, "dgx-01/drain", reason="fan")
    monkeypatch.setattr(drain, "BUDGET_S", -1)  # the reading and what preceded it took it all
    drain.carry_out(scheduler)
    assert list(scheduler.drained) == ["dgx-01"]


def test_a_node_that_the_scheduler_no_longer_lists(ops: User, scheduler: ScriptedScheduler) -> None:
    post(ops, "dgx-01/drain", reason="fan")
    node = Node.objects.get()
    scheduler.machines = []
    drain.carry_out(scheduler)
    order = NodeOrder.objects.get()
    assert (order.state, order.outcome) == ("refused", "The scheduler does not list dgx-01 any more.")
    with pytest.raises(drain.NodeGone):
        drain.request_order(ops, node, NodeOrder.Action.DRAIN, "fan")


@pytest.mark.parametrize(
    ("reason", "status"), [("fan", 202), ("", 422), ("   ", 422), ("x" * 201, 422), ("a\nb", 422), ("a\0b", 422)]
)
def test_a_reason_is_a_single_line(ops: User, scheduler: ScriptedScheduler, reason: str, status: int) -> None:
    assert post(ops, "dgx-01/drain", reason=reason).status_code == status


def test_sysadmins_alone(scheduler: ScriptedScheduler) -> None:
    answer = post(person("mira"), "dgx-01/drain", reason="fan")
    assert answer.status_code == 403
    assert "sysadmins" in answer.json()["detail"]
    assert not NodeOrder.objects.exists()
    assert not AuditEntry.objects.exists()


def test_a_token_needs_the_scope_for_it(ops: User, scheduler: ScriptedScheduler) -> None:
    for scope, status in (("write", 403), ("admin", 202)):
        client = bearer(ops, scope)
        answer = client.post("/api/v1/nodes/dgx-01/drain", {"reason": "fan"}, content_type="application/json")
        assert answer.status_code == status


def test_only_what_is_there(ops: User, scheduler: ScriptedScheduler) -> None:
    Node.objects.create(name="dgx-99", is_made_up=True)
    assert post(ops, "dgx-02/drain", reason="fan").status_code == 404
    assert post(ops, "dgx-99/drain", reason="fan").status_code == 409


def test_an_order_from_before_a_long_pause_is_not_carried_out(ops: User, scheduler: ScriptedScheduler) -> None:
    post(ops, "dgx-01/drain", reason="fan")
    _age(drain.GIVE_UP)
    drain.carry_out(scheduler)
    assert order_of(ops)["state"] == "refused"
    assert order_of(ops)["outcome"] == drain.NOT_REACHED
    assert not scheduler.drained


@pytest.mark.parametrize("action", ["drain", "undrain"])
def test_an_order_is_done_when_its_worker_died_before_recording_it(
    ops: User, scheduler: ScriptedScheduler, action: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if action == "undrain":
        post(ops, "dgx-01/drain", reason="fan")
        drain.carry_out(scheduler)
        sync.read(scheduler, Reading.Part.NODES)
    post(ops, f"dgx-01/{action}", **({"reason": "fan"} if action == "drain" else {}))
    with monkeypatch.context() as patch:
        patch.setattr(drain, "_end", _dies)
        with pytest.raises(KeyboardInterrupt):
            drain.carry_out(scheduler)
    calls = scheduler.requests.count(action)
    drain.carry_out(scheduler)
    assert order_of(ops)["state"] == "done"
    assert scheduler.requests.count(action) == calls


def _dies(*_: object) -> None:
    raise KeyboardInterrupt
