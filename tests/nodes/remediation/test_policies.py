"""Sysadmins set how far Vigil goes with each action, and VIGIL_HEALTH stays the ceiling."""

from __future__ import annotations

from typing import Any

import pytest

from nodes.models import HealthEntry
from nodes.remediation import inbox
from nodes.remediation.decide import decide
from portal.models import AuditEntry, User
from tests.lab import bearer
from tests.nodes.remediation.cluster import Lab

pytestmark = pytest.mark.django_db
URL = "/api/v1/policies"


def put(user: User, **modes: str) -> Any:
    body = {"modes": modes, "reason": "as agreed"}
    return bearer(user, "admin").put(URL, body, content_type="application/json")


def test_policies_are_read_changed_and_audited(ops: User, settings: Any) -> None:
    settings.VIGIL_HEALTH = "propose"
    found = {item["action"]: item for item in bearer(ops, "read").get(URL).json()["items"]}
    assert {action: (item["mode"], item["effective"]) for action, item in found.items()} == {
        "watch": ("act", "act"), "exclude": ("act", "act"), "drain": ("act", "propose"),
        "reset": ("act", "propose"), "replace": ("act", "propose"),
    }  # fmt: skip
    answer = put(ops, replace="ignore", drain="act")
    assert answer.status_code == 200
    (replace,) = [item for item in answer.json()["items"] if item["action"] == "replace"]
    assert (replace["mode"], replace["effective"], replace["changed_by"]) == ("ignore", "ignore", "ops")
    (audit,) = AuditEntry.objects.filter(user=ops)
    assert (audit.action, audit.thing, audit.before, audit.after) == (
        "health_policy.changed", "replace", {"mode": "act"}, {"mode": "ignore"},
    )  # fmt: skip
    assert put(ops, watch="propose").status_code == 422
    assert put(ops, reboot="act").status_code == 422
    assert put(ops).status_code == 422


def test_a_drain_that_is_to_be_proposed_waits_also_where_vigil_acts(lab: Lab, ops: User) -> None:
    put(ops, drain="propose")
    lab.xid(79)
    lab.xid(95, "dgx-02")
    lab.step()
    assert list(lab.scheduler.drained) == ["dgx-02"], "a reset is still done"
    entry = lab.entry()
    assert (entry.decision, entry.held_back) == ("proposed", "The policy for drain is to propose it.")
    inbox.approve(ops, entry.pk, "yes")
    lab.step()
    assert sorted(lab.scheduler.drained) == ["dgx-01", "dgx-02"]


def test_the_ceiling_holds_whatever_the_policy(lab: Lab, ops: User, settings: Any) -> None:
    settings.VIGIL_HEALTH = "propose"
    put(ops, drain="act")
    lab.xid(79)
    lab.step()
    assert not lab.scheduler.drained
    assert "VIGIL_HEALTH=propose" in lab.entry().held_back


def test_an_ignored_action_is_only_counted(lab: Lab, ops: User) -> None:
    put(ops, drain="ignore")
    lab.xid(79)
    lab.step()
    assert not lab.scheduler.drained
    assert (lab.entry().state, lab.entry().action, lab.entry().decision) == ("open", "ignore", "")
    put(ops, drain="act")
    lab.xid(79)
    lab.step()
    assert lab.entry().action == "ignore", "it holds for findings that open from then on"
    assert not lab.scheduler.drained


def test_nodes_to_exclude_wait_for_approval_if_that_is_the_policy(ops: User) -> None:
    entry = HealthEntry.objects.create(
        node="dgx-01", rule="pcie-slow", title="t", state="open", severity="warning", action="exclude",
        first_seen="2026-11-28T12:00Z", last_seen="2026-11-28T12:00Z", opened_at="2026-11-28T12:00Z",
    )  # fmt: skip
    decide()
    assert HealthEntry.objects.excluding().exists()
    put(ops, exclude="propose")
    decide()
    assert not HealthEntry.objects.excluding().exists()
    page = bearer(ops, "read").get("/api/v1/health").json()["items"][0]
    assert (page["decision"], page["held_back"]) == ("proposed", "The policy for exclude is to propose it.")
    inbox.approve(ops, entry.pk, "avoid it")
    assert HealthEntry.objects.excluding().exists()
