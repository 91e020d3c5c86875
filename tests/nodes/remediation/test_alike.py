"""What a rule finds the same on many nodes is one line of the inbox, and one decision."""

from __future__ import annotations

import time
from typing import Any

import pytest

from nodes.models import HealthEntry, NodeOrder
from nodes.remediation import alike
from portal.models import AuditEntry, User
from tests.lab import a_project, bearer, person, signed_in
from tests.nodes.remediation.cluster import NAMES, Lab
from tests.nodes.remediation.test_entry_lists import entries
from tests.nodes.remediation.test_inbox import decide

pytestmark = pytest.mark.django_db
DETAIL = "NVIDIA driver 535.54.03, at least 535.274.02"
OLD = {
    "rule": "below-minimum", "title": "Software is below a minimum version", "severity": "warning", "action": "watch",
    "decision": "", "detail": DETAIL,
}  # fmt: skip


def plain(answer: Any) -> str:
    return str(answer.content.decode()).replace("\N{NO-BREAK SPACE}", " ")


def test_the_same_old_driver_on_many_nodes_is_a_single_line(ops: User) -> None:
    lab = Lab()
    for name in NAMES[:7]:
        machine = lab.machine(name)
        machine.post(machine.facts(time.time(), driver="535.54.03"))
    lab.later(0)
    lab.later(61)
    assert set(HealthEntry.objects.open().values_list("node", "detail")) == {(name, DETAIL) for name in NAMES[:7]}
    page = plain(signed_in(ops).get("/health"))
    assert page.count("Software is below a minimum version</b>") == 1
    assert "on 7 nodes" in page
    assert DETAIL in page
    assert "7 findings, none of which takes a node out of service." in page


def test_other_versions_and_few_nodes_are_separate_lines(ops: User) -> None:
    entries(6, **OLD)
    entries(5, "m", **OLD | {"detail": "NVIDIA driver 550.54.15, at least 550.163.01"})
    page = plain(signed_in(ops).get("/health"))
    assert page.count("Software is below a minimum version</b>") == 1 + 5
    assert "more entr" not in page, "a line of six hides none"


def test_nodes_to_drain_are_decided_separately(ops: User) -> None:
    entries(8)
    assert plain(signed_in(ops).get("/health")).count('class="card finding"') == 8


@pytest.mark.parametrize("action", ["approve", "dismiss", "clear"])
def test_nothing_is_decided_for_all_where_each_node_may_differ(ops: User, action: str) -> None:
    entries(8)
    answer = decide(ops, HealthEntry.objects.all()[0], action, reason="all", alike=True)
    assert answer.status_code == 409
    assert "each finding separately" in answer.json()["detail"]
    assert HealthEntry.objects.waiting().count() == 8


def test_a_single_decision_dismisses_all_that_are_alike(ops: User, django_assert_max_num_queries: Any) -> None:
    entries(30, **OLD)
    entries(2, "m", **OLD | {"detail": "another"})
    first = HealthEntry.objects.filter(detail=DETAIL).latest("last_seen")
    with django_assert_max_num_queries(40):
        answer = decide(ops, first, "dismiss", reason="next maintenance", alike=True)
    assert (answer.status_code, answer.json()["alike_decided"], answer.json()["alike_left"]) == (200, 29, 0)
    assert HealthEntry.objects.filter(detail=DETAIL, state="dismissed", decided_by=ops).count() == 30
    assert HealthEntry.objects.filter(detail="another", state="open").count() == 2
    assert AuditEntry.objects.filter(user=ops, detail="next maintenance").count() == 2
    page = plain(signed_in(ops).get("/health"))
    assert "Dismissed by ops: next maintenance." in page


def test_the_page_clears_all_that_are_alike(ops: User) -> None:
    entries(12, **OLD)
    newest = HealthEntry.objects.latest("last_seen")
    client = signed_in(ops)
    page = client.post(f"/health/{newest.pk}/clear", {"reason": "updated", "alike": "yes"}, follow=True)
    assert "Cleared 12 findings." in plain(page)
    assert not HealthEntry.objects.active().exists()


@pytest.mark.parametrize(("action", "left"), [("dismiss", 0), ("clear", 6)])
def test_a_request_clears_a_limited_number(ops: User, monkeypatch: pytest.MonkeyPatch, action: str, left: int) -> None:
    monkeypatch.setattr(alike, "MAX_DECIDED_SINGLY", 5)
    entries(12, **OLD)
    found = decide(ops, HealthEntry.objects.latest("last_seen"), action, reason="updated", alike=True)
    assert found.status_code == 200
    assert HealthEntry.objects.active().exclude(state="dismissed").count() == left


def test_approving_all_drains_all_but_what_somebody_else_drained(ops: User, settings: Any) -> None:
    settings.VIGIL_HEALTH = "propose"
    lab = Lab()
    lab.scheduler.drain("dgx-03", "broken fan")
    lab.step()
    for name in reversed(NAMES[:7]):
        entries(1, f"{name}-", **OLD | {"action": "drain", "decision": "proposed", "severity": "critical"})
        HealthEntry.objects.filter(node__startswith=f"{name}-").update(node=name)
    assert "Drain all" in plain(signed_in(ops).get("/health"))
    answer = decide(ops, HealthEntry.objects.get(node="dgx-01"), "approve", reason="all", alike=True).json()
    assert (answer["alike_decided"], answer["alike_left"]) == (5, 1)
    ordered = NodeOrder.objects.order_by("pk").values_list("node", flat=True)
    assert list(ordered) == sorted(ordered), "nodes are locked in the order of bulk drains"
    lab.step()
    assert sorted(lab.scheduler.drained) == list(NAMES[:7])
    assert lab.scheduler.drained["dgx-03"] == "broken fan"


def test_dismissing_all_withdraws_their_waiting_drains(ops: User, settings: Any) -> None:
    settings.VIGIL_HEALTH = "propose"
    lab = Lab()
    for name in NAMES[:7]:
        entries(1, f"{name}-", **OLD | {"action": "drain", "decision": "proposed", "severity": "critical"})
        HealthEntry.objects.filter(node__startswith=f"{name}-").update(node=name)
    decide(ops, HealthEntry.objects.get(node="dgx-01"), "approve", reason="all", alike=True)
    assert NodeOrder.objects.open().count() == 7
    HealthEntry.objects.filter(node="dgx-07").update(detail="an older driver still")
    decide(ops, HealthEntry.objects.get(node="dgx-01"), "dismiss", reason="a mistake", alike=True)
    assert list(NodeOrder.objects.open().values_list("node", flat=True)) == ["dgx-07"]
    lab.step()
    assert list(lab.scheduler.drained) == ["dgx-07"]


def test_replaces_no_drain_of_others_for_all(ops: User) -> None:
    entries(6, **OLD | {"action": "drain", "decision": "proposed"})
    answer = decide(ops, HealthEntry.objects.all()[0], "approve", reason="x", alike=True, replace=True)
    assert answer.status_code == 422
    assert HealthEntry.objects.filter(decision="approved").count() == 0


def test_only_sysadmins_decide_about_many(ops: User) -> None:
    entries(6, **OLD)
    mira = person("mira", a_project())
    assert decide(mira, HealthEntry.objects.all()[0], "dismiss", reason="x", alike=True).status_code == 403
    answer = bearer(ops, "admin").post(
        "/api/v1/health/999999/dismiss", {"reason": "x", "alike": True}, content_type="application/json"
    )
    assert answer.status_code == 404
    assert "Decide about all" not in plain(signed_in(mira).get("/health"))
