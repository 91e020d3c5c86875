"""Many nodes are drained by one expression, after a preview, without touching other people's drains."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from nodes.drains import bulk
from nodes.drains.bulk import BulkOutcome
from nodes.models import Node, NodeOrder, QueuedJob
from portal.models import AuditEntry, User
from tests.lab import a_project, bearer, person, signed_in, sysadmin
from tests.nodes.remediation.cluster import Lab

pytestmark = pytest.mark.django_db


@pytest.fixture
def lab() -> Lab:
    return Lab()


def post(user: User, address: str, **body: Any) -> Any:
    client = bearer(user, "admin" if user.is_sysadmin else "submit")
    return client.post(f"/api/v1/drains{address}", body, content_type="application/json")


def test_preview_lists_what_it_affects_and_changes_nothing(lab: Lab, ops: User) -> None:
    QueuedJob.objects.create(scheduler_id="7", name="a", user="mira", state="running", nodes=["dgx-02", "dgx-09"])
    QueuedJob.objects.create(scheduler_id="8", name="b", user="ada", state="pending", nodes=[])
    lab.scheduler.drain("dgx-03", "broken fan")
    lab.step()
    found = post(ops, "/preview", nodes="dgx-[01-04]").json()
    assert found == {
        "nodes": ["dgx-01", "dgx-02", "dgx-03", "dgx-04"], "out_already": ["dgx-03"],
        "reasons": {"dgx-03": "broken fan"}, "jobs": 1, "users": ["mira"],
        "gpus": 6, "cluster_gpus": 22, "partitions": [{"name": "gpu", "nodes": 12, "hit": 4, "out": 4}],
    }  # fmt: skip
    assert not NodeOrder.objects.exists()


def test_drains_all_but_what_somebody_else_drained(lab: Lab, ops: User) -> None:
    lab.scheduler.drain("dgx-03", "broken fan")
    lab.step()
    answer = post(ops, "", nodes="dgx-[01-03]", reason="new switch")
    assert answer.status_code == 202
    assert [(item["node"], item["order"] is not None) for item in answer.json()["items"]] == [
        ("dgx-01", True), ("dgx-02", True), ("dgx-03", False),
    ]  # fmt: skip
    assert "broken fan" in answer.json()["items"][2]["problem"]
    lab.step()
    assert lab.scheduler.drained == {
        "dgx-01": "new switch (vigil: ops)", "dgx-02": "new switch (vigil: ops)", "dgx-03": "broken fan",
    }  # fmt: skip
    assert AuditEntry.objects.filter(user=ops, action="drain").count() == 2
    again = post(ops, "", nodes="dgx-[01-03]", reason="new switch", replace=True)
    assert all(item["order"] for item in again.json()["items"])


def test_replaces_only_the_reasons_that_the_preview_showed(lab: Lab, ops: User) -> None:
    lab.scheduler.drain("dgx-01", "broken fan")
    lab.scheduler.drain("dgx-02", "RMA 4711")
    lab.step()
    reasons = post(ops, "/preview", nodes="dgx-[01-04]").json()["reasons"]
    page = signed_in(ops).get("/drains/several", {"nodes": "dgx-[01-04]"})
    lab.scheduler.drain("dgx-02", "water leak")
    lab.scheduler.drain("dgx-03", "chassis open")
    lab.step()
    items = post(ops, "", nodes="dgx-[01-04]", reason="new switch", replaces=reasons).json()["items"]
    assert [(item["order"] is not None, item["is_drained_by_another"]) for item in items] == [
        (True, False), (False, True), (False, True), (True, False),
    ]  # fmt: skip
    NodeOrder.objects.all().delete()
    form = {"nodes": "dgx-[01-04]", "reason": "new switch", "replace": "yes", "replaces": page.context["reasons"]}
    answer = signed_in(ops).post("/drains/several", form, follow=True).text.replace("\N{NO-BREAK SPACE}", " ")
    left = "Left as they are, because somebody else drained them: dgx-02 and dgx-03."
    assert f"Requested the drain of 2 nodes. {left}" in answer
    lab.step()
    assert (lab.scheduler.drained["dgx-02"], lab.scheduler.drained["dgx-03"]) == ("water leak", "chassis open")


@pytest.mark.parametrize("replaces", ["", "{", "[]", '{"dgx-01": 1}', "[" * 100_000])
def test_a_form_without_the_displayed_reasons_replaces_none(lab: Lab, ops: User, replaces: str) -> None:
    lab.scheduler.drain("dgx-01", "broken fan")
    lab.step()
    form = {"nodes": "dgx-01", "reason": "new switch", "replace": "yes", "replaces": replaces}
    assert signed_in(ops).post("/drains/several", form).status_code == 302
    assert not NodeOrder.objects.exists()


def test_a_node_that_left_the_scheduler_is_not_reported_as_drained(
    lab: Lab, ops: User, monkeypatch: pytest.MonkeyPatch
) -> None:
    for_each = bulk.for_each

    def lose_a_node(nodes: Sequence[Node], order: Callable[[Node], BulkOutcome]) -> list[BulkOutcome]:
        Node.objects.filter(name="dgx-02").delete()
        return for_each(nodes, order)

    monkeypatch.setattr(bulk, "for_each", lose_a_node)
    form = {"nodes": "dgx-[01-02]", "reason": "new switch"}
    answer = signed_in(ops).post("/drains/several", form, follow=True).text.replace("\N{NO-BREAK SPACE}", " ")
    assert "Requested the drain of 1 node. The scheduler does not list dgx-02 any more." in answer


@pytest.mark.parametrize(
    ("nodes", "message"),
    [
        ("dgx-[01-99]", "The scheduler does not know dgx-13, dgx-14"),
        ("n[1-999999999]", "more than 1,000 nodes"),
        ("dgx-[", "do not match"),
    ],
)
def test_refuses_before_any_order(lab: Lab, ops: User, nodes: str, message: str) -> None:
    for address, more in (("", {"reason": "x"}), ("/preview", {})):
        answer = post(ops, address, nodes=nodes, **more)
        assert answer.status_code == 422
        assert message in answer.json()["errors"][0]["message"]
    page = signed_in(ops).get("/drains/several", {"nodes": nodes}).text
    assert message.replace("'", "&#x27;") in page
    assert not NodeOrder.objects.exists()


def test_only_sysadmins(lab: Lab) -> None:
    ada = person("ada", a_project())
    assert post(ada, "", nodes="dgx-01", reason="x").status_code == 403
    assert post(ada, "/preview", nodes="dgx-01").status_code == 403
    assert signed_in(ada).get("/drains/several").status_code == 403
    assert signed_in(ada).post("/drains/several", {"nodes": "dgx-01", "reason": "x"}).status_code == 403
    assert "Drain nodes…" not in signed_in(ada).get("/drains").text


def test_the_page_previews_and_drains(lab: Lab, ops: User) -> None:
    client = signed_in(ops)
    assert "/drains/several" in client.get("/drains").text
    page = client.get("/drains/several", {"nodes": "dgx-[01-03]"}).text.replace("\N{NO-BREAK SPACE}", " ")
    assert "This drains 3 nodes, 25 % of the GPUs in service." in page
    assert "No job runs there." in page
    assert client.post("/drains/several", {"nodes": "dgx-[01-03]", "reason": " "}).status_code == 422
    assert not NodeOrder.objects.exists()
    answer = client.post("/drains/several", {"nodes": "dgx-[01-03]", "reason": "new  switch"})
    assert answer.status_code == 302
    assert {order.reason for order in NodeOrder.objects.all()} == {"new switch"}
    assert NodeOrder.objects.open().count() == 3


@pytest.mark.parametrize("replace", [False, True])
def test_two_sysadmins_at_once_give_a_single_order_per_node(lab: Lab, ops: User, replace: bool) -> None:
    post(ops, "", nodes="dgx-[01-02]", reason="switch")
    answer = post(sysadmin("eva"), "", nodes="dgx-[02-03]", reason="cable", replace=replace)
    problems = ["", ""] if replace else ["ops has just ordered to drain dgx-02.", ""]
    assert [item["problem"] for item in answer.json()["items"]] == problems
    lab.step()
    assert lab.scheduler.drained == {
        "dgx-01": "switch (vigil: ops)", "dgx-02": "cable (vigil: eva)" if replace else "switch (vigil: ops)",
        "dgx-03": "cable (vigil: eva)",
    }  # fmt: skip
    assert lab.scheduler.requests.count("drain") == 3
