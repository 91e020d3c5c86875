"""The page of health rules: try, save, switch off; errors stand next to the text, and nothing is saved untried."""

from __future__ import annotations

import re
from typing import Any

import pytest

from nodes.models import ActionPolicy, SiteRule
from portal.models import User
from tests.lab import a_project, person, signed_in, sysadmin
from tests.nodes.monitoring.test_site_rules import RULE
from tests.nodes.remediation.cluster import Lab

pytestmark = pytest.mark.django_db


@pytest.fixture
def ops() -> User:
    return sysadmin("ops")


def post(user: User, path: str = "new", **fields: Any) -> Any:
    return signed_in(user).post(f"/health/rules/{path}", {"version": 0, **fields})


def text_of(answer: Any) -> str:
    return str(answer.content.decode()).replace("\N{NO-BREAK SPACE}", " ")


def proof_in(page: str) -> str:
    found = re.search(r'name="proof" value="([^"]+)"', page)
    assert found
    return found[1]


def test_a_rule_is_tried_then_saved(ops: User) -> None:
    lab = Lab()
    lab.xid(31, ago=3600)
    page = text_of(post(ops, do="try", text=RULE))
    assert "It would have opened 1 finding on 1 node, and Vigil would have drained 1 node." in page
    assert "Xid 31, still open. Action: drain, Vigil would have drained the node." in page
    answer = post(ops, do="save", text=RULE, proof=proof_in(page), reason="after the incident")
    assert answer.status_code == 302
    listed = text_of(signed_in(ops).get("/health/rules"))
    assert 'href="/health/rules/xid-31"' in listed
    page = text_of(signed_in(ops).get("/health/rules/xid-31"))
    assert "the site’s, changed by ops" in page
    assert 'name="version" value="1"' in page


def test_a_text_that_changed_after_its_dry_run_is_not_saved(ops: User) -> None:
    proof = proof_in(text_of(post(ops, do="try", text=RULE)))
    answer = post(ops, do="save", text=RULE.replace("31", "13"), proof=proof, reason="x")
    assert answer.status_code == 422
    assert not SiteRule.objects.exists()
    assert not SiteRule.objects.exists()


def test_a_missing_reason_keeps_the_dry_run(ops: User) -> None:
    tried = text_of(post(ops, do="try", text=RULE))
    assert tried.index('value="save"') < tried.index('value="try"'), "Enter in the reason field saves"
    answer = post(ops, do="save", text=RULE, proof=proof_in(tried), reason=" ")
    assert answer.status_code == 422
    assert not SiteRule.objects.exists()
    page = text_of(answer)
    assert 'aria-describedby="reason-e"' in page
    assert post(ops, do="save", text=RULE, proof=proof_in(page), reason="why").status_code == 302


def test_an_error_stands_next_to_the_text_which_stays(ops: User) -> None:
    answer = post(ops, do="try", text=RULE.replace("where = { code = 31 }", "where = { kode = 31 }"))
    page = text_of(answer)
    assert answer.status_code == 422
    assert 'aria-describedby="text-e"' in page
    assert "Did you mean code?" in page
    assert "kode = 31" in page
    assert "<script>" not in text_of(post(ops, do="try", text="<script>alert(1)</script>"))


def test_two_sysadmins_at_once(ops: User) -> None:
    proof = proof_in(text_of(post(ops, do="try", text=RULE)))
    assert post(ops, do="save", text=RULE, proof=proof, reason="x").status_code == 302
    answer = post(ops, do="save", text=RULE, proof=proof, reason="x")
    assert answer.status_code == 422
    assert "has a rule xid-31 already" in text_of(answer)


def test_rules_are_switched_off_and_deleted(ops: User) -> None:
    assert post(ops, "off-bus/off", reason="known").status_code == 302
    assert SiteRule.objects.get().is_enabled is False
    assert ">off</span>" in text_of(signed_in(ops).get("/health/rules"))
    post(ops, "off-bus/delete", reason="again", version=7)
    assert SiteRule.objects.exists(), "somebody else's version"
    post(ops, "off-bus/delete", reason="again", version=1)
    assert not SiteRule.objects.exists()
    assert post(ops, "nothing/off", reason="x").status_code == 404


def test_policies_are_set_with_a_reason(ops: User) -> None:
    signed_in(ops).post("/health/policies", {"drain": "propose"})
    assert not ActionPolicy.objects.exists()
    signed_in(ops).post("/health/policies", {"drain": "propose", "watch": "act", "reason": "a quiet week"})
    assert [str(row) for row in ActionPolicy.objects.all()] == ["drain: propose"]


def test_people_read_and_do_not_change(ops: User) -> None:
    mira = person("mira", a_project())
    page = text_of(signed_in(mira).get("/health/rules/off-bus"))
    assert "readonly" in page
    assert "Try on the last" not in page
    assert "Save policies" not in text_of(signed_in(mira).get("/health/rules"))
    for path in ("new", "off-bus", "off-bus/off", "off-bus/delete"):
        assert post(mira, path, do="try", text=RULE, reason="x").status_code == 403
    assert signed_in(mira).post("/health/policies", {"drain": "act", "reason": "x"}).status_code == 403
    assert signed_in(mira).get("/health/rules/nothing").status_code == 404


def test_an_unreadable_rule_is_shown_with_its_problem(ops: User) -> None:
    SiteRule.objects.create(name="odd", toml="[[rule]")
    page = text_of(signed_in(ops).get("/health/rules"))
    assert "unreadable" in page
    assert signed_in(ops).get("/health/rules/odd").status_code == 200
