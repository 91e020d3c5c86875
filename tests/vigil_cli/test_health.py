"""`vigil health` shows equal findings as one line and decides about them together."""

# ruff: noqa: F811 (fixtures that are imported)
from __future__ import annotations

import json
from typing import Any

from tests.vigil_cli.commands import nowhere, portal, vigil  # noqa: F401

DETAIL = "NVIDIA driver 535.54.03, at least 535.274.02"
BREAKER = {"tripped_at": None, "rule": "", "detail": ""}


def entry(number: int, **more: Any) -> dict[str, Any]:
    return {
        "id": number, "node": f"dgx-{number:02}", "gpu": None, "item": "", "rule": "below-minimum",
        "title": "Software is below a minimum version", "detail": DETAIL, "state": "open", "severity": "warning",
        "action": "watch", "decision": "", "decided_by": None, "count": 1, "last_seen": "2026-12-01T12:00:00Z", **more,
    }  # fmt: skip


def test_what_waits_for_a_sysadmin_comes_first(portal):
    items = [entry(1, title="Fatal", severity="fatal"), entry(2, title="Waits", severity="info", decision="proposed")]
    portal.answers["GET", "health"] = {"items": items, "next": None}
    portal.answers["GET", "health/breaker"] = BREAKER
    first, second = vigil("health").stdout.splitlines()[1:]
    assert "Waits" in first
    assert "Fatal" in second


def test_a_tripped_breaker_comes_with_what_to_do(portal):
    portal.answers["GET", "health"] = {"items": [], "next": None}
    tripped = {"tripped_at": "2026-12-01T12:00:00Z", "rule": "off-bus", "detail": "off-bus was found on 4 nodes."}
    portal.answers["GET", "health/breaker"] = tripped
    since, remedy = vigil("health").stdout.splitlines()[-2:]
    assert "off-bus was found on 4 nodes." in since
    assert "/health" in remedy


def test_many_equal_findings_are_one_line(portal):
    items = [entry(number) for number in range(1, 8)] + [entry(9, detail="another"), entry(10, detail="", title="Hot")]
    portal.answers["GET", "health"] = {"items": items, "next": None}
    portal.answers["GET", "health/breaker"] = BREAKER
    lines = vigil("health").stdout.splitlines()
    assert len(lines) == 1 + 3
    assert "dgx-07 and 6 more" in "\n".join(lines)
    assert DETAIL in "\n".join(lines)
    assert len(json.loads(vigil("health", "--json").stdout)["items"]) == 9


def test_more_entries_than_it_shows_are_mentioned(portal):
    portal.answers["GET", "health"] = {"items": [entry(number) for number in range(1, 501)], "next": "more"}
    portal.answers["GET", "health/breaker"] = BREAKER
    assert vigil("health").stdout.splitlines()[-1].startswith("There are more: only the newest 1,000 are shown.")
    assert json.loads(vigil("health", "--json").stdout)["has_more"] is True


def test_one_decision_is_about_all_that_are_alike(portal):
    portal.answers["POST", "health/7/dismiss"] = entry(7, state="dismissed", alike_decided=6, alike_left=1)
    portal.answers["GET", "health/7"] = entry(7)
    items = [entry(number) for number in range(1, 8)] + [entry(9, detail="another")]
    portal.answers["GET", "health"] = {"items": items, "next": None}
    refused = vigil("health", "dismiss", "7", "--alike", "--reason", "later", status=1).stderr
    assert "Add --yes to dismiss 7 findings." in refused
    assert portal.asked[-1].method == "GET", "nothing was decided"
    lines = vigil("health", "dismiss", "7", "--alike", "--yes", "--reason", "later").stdout.splitlines()
    assert json.loads(portal.asked[-1].content) == {"reason": "later", "alike": True}
    assert lines[-2:] == ["The same for 6 other findings.", "Unchanged: 1 finding."]
    vigil("health", "dismiss", "7", "--reason", "later")
    assert json.loads(portal.asked[-1].content) == {"reason": "later"}
    assert "--alike" in vigil("health", "approve", "7", "--reason", "x", "--alike", "--replace", status=2).stderr
