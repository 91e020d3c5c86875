"""Sysadmins write rules over REST: tried on the past first, checked on their examples, never overwriting each other."""

from __future__ import annotations

import tomllib
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nodes.health.rules.catalogue import shipped_text
from nodes.health.rules.rule import BadRule, parse_rule
from nodes.models import HealthEntry, SiteRule
from nodes.monitoring.site_rules import rules_in_force
from portal.models import AuditEntry, User
from tests.examples import examples
from tests.lab import a_project, bearer, person, sysadmin
from tests.nodes.remediation.cluster import Lab

pytestmark = pytest.mark.django_db
RULE = """
[[rule]]
name = "xid-31"
title = "Xid 31"
source = "a test"
severity = "critical"
action = "drain"
signal = "xid"
where = { code = 31 }
clears = "person"
example = [
  { fires = true, steps = [{ code = 31 }] },
  { fires = false, steps = [{ code = 13 }] },
]
"""
URL = "/api/v1/health/rules"


def send(user: User, method: str, path: str = "", **body: Any) -> Any:
    client = bearer(user, "admin" if user.is_sysadmin else "submit")
    return getattr(client, method)(f"{URL}{path}", body, content_type="application/json")


def proof(user: User, text: str = RULE) -> str:
    found = send(user, "post", "/try", toml=text)
    assert found.status_code == 200, found.json()
    return str(found.json()["proof"])


def add(user: User, text: str = RULE, **more: Any) -> Any:
    return send(user, "post", toml=text, dry_run=more.pop("dry_run", None) or proof(user, text), reason="new", **more)


def test_a_rule_is_tried_saved_applied_and_audited(ops: User) -> None:
    lab = Lab()
    lab.xid(31, ago=3600)
    tried = send(ops, "post", "/try", toml=RULE).json()
    assert (tried["found"], tried["entries"][0]["node"], tried["cut"]) == (1, "dgx-01", "")
    assert tried["entries"][0]["observed"] == {"code": 31, "text": "code 31", "is_fatal": False} | {
        name: tried["entries"][0]["observed"][name] for name in ("is_listed", "is_echo", "is_implied")
    }
    saved = add(ops, dry_run=tried["proof"])
    assert saved.status_code == 201, saved.json()
    assert (saved.json()["version"], saved.json()["is_site"], saved.json()["changed_by"]) == (1, True, "ops")
    lab.xid(31, text="again")
    lab.step()
    assert lab.entry("xid-31").state == "open"
    audit = AuditEntry.objects.get(user=ops)
    assert (audit.action, audit.thing, audit.detail) == ("health_rule.added", "xid-31", "new")
    assert "code = 31" in audit.after["toml"]


def test_a_text_that_was_not_tried_is_refused(ops: User) -> None:
    other = sysadmin("other")
    for dry_run in ("", "x", proof(ops, RULE.replace("31", "32")), proof(other)):
        refused = send(ops, "post", toml=RULE, dry_run=dry_run, reason="new")
        assert refused.status_code == 422
        assert "has not been tried" in refused.json()["detail"]
    assert not SiteRule.objects.exists()
    with_other_line_ends = RULE.replace("\n", "\r\n")
    assert add(ops, with_other_line_ends, dry_run=proof(ops)).status_code == 201


@pytest.mark.parametrize(("text", "why"), [
    ("", "The text has 0 rules"),
    (RULE + RULE.replace("xid-31", "b"), "The text has 2 rules"),
    ("[[rule]", "This is not TOML"),
    (RULE.replace("code = 31 }\nclears", "kode = 31 }\nclears"), "Did you mean code?"),
    (RULE.replace("fires = false, steps = [{ code = 13", "fires = false, steps = [{ code = 31"), "must not fire on it"),
    (RULE[: RULE.index("example")], "needs two examples"),
    (RULE.replace('title = "Xid 31"', 'title = "a\\u0000b"'), "without control characters"),
    (RULE.replace('"xid-31"', '"try"'), "Choose another name"),
    ("x" * 1_000_000, "20000 characters"),
    ("a = " + "[" * 9_000 + "]" * 9_000, "deep"),
])  # fmt: skip
def test_errors_are_reported_and_nothing_is_tried(ops: User, text: str, why: str) -> None:
    refused = send(ops, "post", "/try", toml=text)
    assert (refused.status_code, refused.json()["type"]) == (422, "urn:vigil:problem:invalid")
    assert why in str(refused.json())


def test_two_sysadmins_never_overwrite_each_other(ops: User) -> None:
    other = sysadmin("other")
    add(ops)
    assert add(other).status_code == 409
    ours, theirs = RULE.replace("Xid 31", "mine"), RULE.replace("Xid 31", "theirs")
    body = {"version": 1, "reason": "better"}
    assert send(ops, "put", "/xid-31", toml=ours, dry_run=proof(ops, ours), **body).json()["version"] == 2
    refused = send(other, "put", "/xid-31", toml=theirs, dry_run=proof(other, theirs), **body)
    assert refused.status_code == 409
    assert "changed by ops since you opened it (version 2)" in refused.json()["detail"]
    assert "mine" in SiteRule.objects.get().toml
    assert send(other, "delete", "/xid-31?version=1&reason=x").status_code == 409


def test_what_is_switched_off_is_the_rule_that_applied(ops: User, settings: Any) -> None:
    assert shipped_text("program-error") != shipped_text("program-error", True)
    for is_strict in (False, True):
        settings.VIGIL_HEALTH_STRICT = is_strict
        SiteRule.objects.all().delete()
        send(ops, "put", "/program-error", is_enabled=False, version=0, reason="noise")
        assert SiteRule.objects.get().toml == shipped_text("program-error", is_strict)


def test_rules_are_switched_off_and_deleted(ops: User) -> None:
    assert "off-bus" in rules_in_force()
    off = send(ops, "put", "/off-bus", is_enabled=False, version=0, reason="known")
    assert (off.status_code, off.json()["is_enabled"], off.json()["version"]) == (200, False, 1)
    assert "off-bus" not in rules_in_force()
    text = send(ops, "get", "/off-bus").json()["toml"]
    on = send(ops, "put", "/off-bus", toml=text, dry_run=proof(ops, text), version=1, reason="again")
    assert on.json()["is_enabled"], on.json()
    assert rules_in_force()["off-bus"].is_site
    assert send(ops, "delete", "/off-bus?version=2&reason=shipped+again").status_code == 204
    assert not rules_in_force()["off-bus"].is_site
    assert send(ops, "delete", "/off-bus?version=2&reason=x").status_code == 404
    assert send(ops, "put", "/nothing", is_enabled=False, version=0, reason="x").status_code == 404
    assert [entry.action for entry in AuditEntry.objects.order_by("id")] == [
        "health_rule.disabled", "health_rule.changed", "health_rule.deleted",
    ]  # fmt: skip


def test_a_graver_action_applies_to_findings_that_open_from_then_on(ops: User, settings: Any) -> None:
    watched = RULE.replace('"drain"', '"watch"')
    add(ops, watched)
    lab = Lab()
    for name in lab.names[:6]:
        lab.xid(31, name)
    lab.step()
    settings.VIGIL_HEALTH = "act"
    send(ops, "put", "/xid-31", toml=RULE, dry_run=proof(ops), version=1, reason="it is worse")
    for name in lab.names[:7]:
        lab.xid(31, name, ago=-1, text="again")
    lab.step()
    actions = dict(HealthEntry.objects.filter(rule="xid-31").values_list("node", "action"))
    assert actions == dict.fromkeys(lab.names[:6], "watch") | {lab.names[6]: "drain"}
    assert list(lab.scheduler.drained) == [lab.names[6]]
    send(ops, "put", "/xid-31", toml=watched, dry_run=proof(ops, watched), version=2, reason="or not")
    lab.xid(31, lab.names[6], ago=-2, text="again")
    lab.step()
    assert lab.entry("xid-31", lab.names[6]).action == "watch", "a milder one applies at once"


def test_a_rule_that_is_off_ends_its_findings(ops: User) -> None:
    lab = Lab()
    lab.xid(79)
    lab.step()
    send(ops, "put", "/off-bus", is_enabled=False, version=0, reason="known")
    lab.step()
    assert lab.entry().state == "cleared"


def test_findings_of_a_rule_that_becomes_unreadable_stay_open(ops: User) -> None:
    add(ops)
    lab = Lab()
    lab.xid(31)
    lab.step()
    SiteRule.objects.update(toml="[[rule]")
    HealthEntry.objects.update(due_at=HealthEntry.objects.get(rule="xid-31").first_seen)
    lab.step()
    assert lab.entry("xid-31").state == "open", "an upgrade must not return a broken node to service"


def test_an_unreadable_rule_stops_no_other(ops: User) -> None:
    SiteRule.objects.create(name="hot", toml="[[rule]")
    SiteRule.objects.create(name="off-bus", toml=RULE)
    SiteRule.objects.create(
        name="weird", toml='[[rule]]\nname = "weird"\nexample = [{ fires = true, steps = [{ signal = [1] }] }]'
    )
    add(ops)
    rules = rules_in_force()
    assert {"hot", "off-bus", "xid-31"} <= rules.keys()
    assert not rules["hot"].is_site
    lab = Lab()
    lab.xid(79)
    lab.step()
    assert lab.entry().state == "open"
    listed = {rule["name"]: rule for rule in send(ops, "get").json()["items"]}
    assert "must have one [[rule]] of this name" in listed["off-bus"]["problem"]
    assert not listed["weird"]["is_enabled"]


def test_only_sysadmins_change_rules_and_policies(ops: User) -> None:
    mira = person("mira", a_project())
    add(ops)
    assert send(mira, "post", "/try", toml=RULE).status_code == 403
    assert send(mira, "post", toml=RULE, dry_run="x", reason="x").status_code == 403
    assert send(mira, "put", "/xid-31", is_enabled=False, version=1, reason="x").status_code == 403
    assert send(mira, "delete", "/xid-31?version=1&reason=x").status_code == 403
    assert send(mira, "get", "/xid-31").json()["toml"].startswith("[[rule]]")
    policies = bearer(mira, "submit").put(
        "/api/v1/policies", {"modes": {"drain": "act"}, "reason": "x"}, content_type="application/json"
    )
    assert policies.status_code == 403
    assert bearer(ops, "read").post(f"{URL}/try", {"toml": RULE}, content_type="application/json").status_code == 403


SIMPLE: Any = st.none() | st.booleans() | st.integers() | st.floats() | st.sampled_from(["xid", "5m", "> 3", "\0"])
FIELDS = st.sampled_from(["at", "signal", "code", "count"])
VALUES: Any = st.recursive(
    SIMPLE, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(FIELDS, inner), max_leaves=6
)
KEYS = ("name", "severity", "action", "signal", "where", "count", "within", "distinct", "for", "trigger", "example",
        "escalates", "clears", "clears_after", "clears_where", "enabled", "title")  # fmt: skip


@settings(max_examples=examples(300), deadline=None)
@given(st.dictionaries(st.sampled_from(KEYS), VALUES, max_size=4))
def test_whatever_a_table_has_it_is_read_or_refused(changes: dict[str, Any]) -> None:
    table = tomllib.loads(RULE)["rule"][0] | changes
    with suppress(BadRule):
        parse_rule(table)


@pytest.mark.parametrize("name", ["spare", "burn-in", "maintenance-", "maintenance-1", "maintenance-crew"])
def test_names_under_which_vigil_itself_drains_are_refused(ops: User, name: str) -> None:
    """Orders of such a rule would count towards no limit, and be taken for those of a spare or a window."""
    answer = send(ops, "post", "/try", toml=RULE.replace('"xid-31"', f'"{name}"'))
    assert answer.status_code == 422
    assert "Choose another name." in answer.json()["detail"]
