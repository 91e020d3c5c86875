"""Sysadmins decide on the page, over REST and at the command line; everybody else only reads."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from django.utils import timezone

from nodes.cluster import drain
from nodes.models import HealthEntry, Node, NodeOrder, SiteRule
from nodes.monitoring.evaluate import evaluate
from portal.models import User
from tests.lab import a_project, bearer, person, signed_in
from tests.nodes.remediation.cluster import NAMES, Lab
from tests.nodes.remediation.test_entry_lists import entries

pytestmark = pytest.mark.django_db
TRIED = """
[[rule]]
name = "tried"
title = "Tried"
source = "a test"
severity = "warning"
action = "watch"
signal = "xid"
where = { code = 63 }
clears = "quiet"
clears_after = "1h"
"""


@pytest.fixture
def lab(settings: Any) -> Lab:
    settings.VIGIL_HEALTH = "propose"
    return Lab()


@pytest.fixture
def mira() -> User:
    return person("mira", a_project())


def found(lab: Lab) -> HealthEntry:
    lab.xid(79, text="GPU has fallen off the bus.")
    lab.step()
    return lab.entry()


def decide(user: User, entry: HealthEntry, action: str, **body: Any) -> Any:
    return bearer(user, "admin" if user.is_sysadmin else "submit").post(
        f"/api/v1/health/{entry.pk}/{action}", body, content_type="application/json"
    )


def test_the_page_shows_what_waits_and_drains_on_approval(lab: Lab, ops: User) -> None:
    entry = found(lab)
    page = signed_in(ops).get("/health").content.decode()
    assert "1 finding waits for a decision." in page.replace("\N{NO-BREAK SPACE}", " ")
    assert "Xid 79: GPU has fallen off the bus" in page
    assert "VIGIL_HEALTH=propose" in page
    answer = signed_in(ops).post(f"/health/{entry.pk}/approve", {"reason": "seen it"})
    assert answer.status_code == 302
    lab.step()
    assert list(lab.scheduler.drained) == ["dgx-01"]
    page = signed_in(ops).get("/health").content.decode()
    assert "needs repair." in page
    assert "approved by ops" in page


def test_what_became_of_an_order_is_shown(lab: Lab, ops: User, settings: Any) -> None:
    settings.VIGIL_HEALTH = "act"
    entry = found(lab)
    sent, away = "Sent to the scheduler within seconds.", "Slurm did not answer for 10 s. Retrying."
    replaced = "Replaced by a later order."
    for state, outcome, of_finding, text in (
        ("asked", "", f"Drain by Vigil. {sent}", sent),
        ("asked", "Slurm did not answer for 10 s.", f"Drain by Vigil. {away}", away),
        ("done", "", "Drained by Vigil. ", "Done."),
        ("replaced", "", f"Drain by Vigil. {replaced}", replaced),
    ):
        NodeOrder.objects.filter(health_entries=entry).update(state=state, outcome=outcome)
        page = signed_in(ops).get("/health").content.decode()
        assert of_finding in page, "with the finding"
        assert f"by the health rule off-bus. {text}" in page, "in the list of orders"


@pytest.mark.parametrize(("visible", "is_shown"), [("everyone", True), ("own", False)])
def test_the_kernels_text_is_hidden_where_jobs_are(
    lab: Lab, ops: User, mira: User, settings: Any, visible: str, is_shown: bool
) -> None:
    settings.VIGIL_QUEUE_VISIBLE = visible
    found(lab)
    for user, shown in ((ops, True), (mira, is_shown)):
        client, text = signed_in(user), "fallen off the bus."
        for address in ("/health", "/health/entries", "/nodes/dgx-01"):
            page = client.get(address).content.decode()
            assert "Xid 79" in page
            assert ("Xid 79: GPU has fallen off the bus" in page) == shown, address
        assert (text in bearer(user, "read").get("/api/v1/health").content.decode()) == shown


def test_the_nodes_page_lists_its_findings(lab: Lab, ops: User, mira: User) -> None:
    entry = found(lab)
    page = signed_in(mira).get("/nodes/dgx-01").content.decode()
    assert "GPU fell off the bus</b>" in page
    assert "Waits for a decision." in page
    assert entry.title not in signed_in(mira).get("/nodes/dgx-02").content.decode()
    clear = f"/health/{entry.pk}/clear"
    assert clear not in page
    page = signed_in(ops).get("/nodes/dgx-01").content.decode()
    assert f"/health/{entry.pk}/approve" in page
    assert clear in page
    answer = signed_in(ops).post(clear, {"reason": "new GPU", "next": "node"})
    assert answer["Location"] == "/nodes/dgx-01"
    assert "Waits for a decision" not in signed_in(ops).get("/nodes/dgx-01").content.decode()


def test_people_read_and_only_sysadmins_decide(lab: Lab, mira: User) -> None:
    entry = found(lab)
    page = signed_in(mira).get("/health")
    assert page.status_code == 200
    assert f"/health/{entry.pk}/approve" not in page.content.decode()
    for action in ("approve", "dismiss", "clear"):
        assert signed_in(mira).post(f"/health/{entry.pk}/{action}", {"reason": "x"}).status_code == 403
        assert decide(mira, entry, action, reason="x").status_code == 403
    assert signed_in(mira).post("/health/breaker", {"reason": "x"}).status_code == 403
    assert lab.entry().decision == "proposed"


def test_rest_lists_filters_and_hides_the_owner_of_the_program(lab: Lab, ops: User, mira: User) -> None:
    entry = found(lab)
    stored = HealthEntry.objects.get(pk=entry.pk)
    stored.evidence[-1][2]["user"] = "ada"
    stored.save()
    (item,) = bearer(mira, "read").get("/api/v1/health", {"node": "dgx-01"}).json()["items"]
    assert (item["rule"], item["gpu"], item["state"], item["decision"]) == ("off-bus", 0, "open", "proposed")
    assert "user" not in item["evidence"][0]["fields"]
    (item,) = bearer(ops, "read").get("/api/v1/health").json()["items"]
    assert item["evidence"][0]["fields"]["user"] == "ada"
    for wanted in ({"node": "dgx-02"}, {"severity": "info"}, {"rule": "hot"}, {"state": "cleared"}):
        assert bearer(ops, "read").get("/api/v1/health", wanted).json()["items"] == []
    assert bearer(ops, "read").get(f"/api/v1/health/{entry.pk}").json()["id"] == entry.pk
    assert bearer(ops, "read").get("/api/v1/health/99999").status_code == 404


def test_decisions_need_a_reason_and_a_fitting_state(lab: Lab, ops: User) -> None:
    entry = found(lab)
    assert decide(ops, entry, "approve").status_code == 422
    assert decide(ops, entry, "approve", reason=" ").status_code == 422
    assert decide(ops, entry, "approve", reason="x", force=True).status_code == 422
    assert decide(ops, entry, "clear", reason="reseated").json()["state"] == "cleared"
    assert decide(ops, entry, "dismiss", reason="x").status_code == 409
    assert decide(ops, entry, "approve", reason="x").status_code == 409


def test_evidence_after_the_end_of_a_dismissed_entry_opens_another(lab: Lab, ops: User) -> None:
    """Also if the worker was away when the entry was over: the decision was about the entry, not about the rule."""
    SiteRule.objects.create(name="tried", toml=TRIED)
    now = timezone.now()
    for hours in (3, 1):
        lab.xid(63, ago=3600 * hours, text="a remapped row" + "!" * hours)
        evaluate(now - timedelta(hours=hours) + timedelta(seconds=1))
        if hours == 3:
            decide(ops, lab.entry("tried"), "dismiss", reason="new memory is on its way")
    rows = HealthEntry.objects.filter(rule="tried").order_by("pk")
    assert list(rows.values_list("state", "decision", "count")) == [("cleared", "dismissed", 1), ("open", "", 1)]
    over, follower = rows
    assert over.cleared_at is not None
    assert follower.opened_at is not None
    assert (follower.opened_at - over.cleared_at).total_seconds() == pytest.approx(3600, abs=60)
    assert [len(row.evidence) for row in rows] == [1, 1]


def test_approving_over_another_persons_drain_needs_replace(lab: Lab, ops: User) -> None:
    lab.scheduler.drain("dgx-01", "broken fan")
    lab.step()
    entry = found(lab)
    assert decide(ops, entry, "approve", reason="x").status_code == 409
    assert decide(ops, entry, "approve", reason="x", replace=True).status_code == 200
    lab.step()
    assert lab.scheduler.drained == {"dgx-01": "[node] Xid 79 on GPU 0: off-bus (vigil: ops)"}


def test_approving_again_what_a_person_undrained_drains_again(lab: Lab, ops: User, settings: Any) -> None:
    settings.VIGIL_HEALTH = "act"
    entry = found(lab)
    assert decide(ops, entry, "approve", reason="seen").json()["decision"] == "automatic", "it is drained already"
    node = Node.objects.get(name="dgx-01")
    drain.request_order(ops, node, NodeOrder.Action.UNDRAIN, replaces=node.reason)
    lab.step()
    assert not lab.scheduler.drained
    answer = decide(ops, entry, "approve", reason="it is broken after all").json()
    assert (answer["decision"], answer["order"]["state"]) == ("approved", "asked")
    lab.step()
    assert list(lab.scheduler.drained) == ["dgx-01"]


def test_a_dismissed_proposal_to_exclude_can_be_approved(ops: User) -> None:
    entries(1, action="exclude", severity="warning")
    entry = HealthEntry.objects.get()
    assert decide(ops, entry, "dismiss", reason="known").json()["state"] == "dismissed"
    assert decide(ops, entry, "approve", reason="slow after all").json()["decision"] == "approved"
    assert list(HealthEntry.objects.excluding()) == [entry]


def test_rules_are_listed_with_where_they_come_from(ops: User) -> None:
    rules = {rule["name"]: rule for rule in bearer(ops, "read").get("/api/v1/health/rules").json()["items"]}
    assert rules["off-bus"]["clears"] == "boot after 5m"
    assert rules["off-bus"]["needs_burn_in"]
    assert "GPU fell off the bus" in signed_in(ops).get("/health/rules").content.decode()


def test_the_breaker_is_shown_and_reset_with_a_reason(lab: Lab, ops: User, settings: Any) -> None:
    settings.VIGIL_HEALTH = "act"
    for node in NAMES[:4]:
        lab.xid(79, node)
    lab.step()
    shown = bearer(ops, "read").get("/api/v1/health/breaker").json()
    assert shown["rule"] == "off-bus"
    assert "Automatic actions are stopped" in signed_in(ops).get("/health").content.decode()
    for wrong in ("", "x" * 201):
        assert signed_in(ops).post("/health/breaker", {"reason": wrong}).status_code == 302
    assert bearer(ops, "read").get("/api/v1/health/breaker").json()["tripped_at"]
    signed_in(ops).post("/health/breaker", {"reason": "a switch was rebooted"})
    assert bearer(ops, "read").get("/api/v1/health/breaker").json()["tripped_at"] is None


def test_empty_pages_explain_what_comes(mira: User) -> None:
    page = signed_in(mira).get("/health").content.decode()
    assert "No node is known yet." in page
    assert "No findings yet" in page
