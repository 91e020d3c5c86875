"""`vigil health try` shows what a rule would have found, and `vigil health rules` also the site's rules."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.vigil_cli.commands import nowhere, portal, problem, vigil  # noqa: F401

RULE = '[[rule]]\nname = "hot"\n'
ANSWER = {
    "rule": "hot", "nodes": 3, "nodes_read": 3, "found": 2, "seconds": 0.5, "nodes_drained": 1, "cut": "",
    "tripped_at": None, "untried": ["No history of the signal agent is stored."],
    "entries": [
        {
            "opened_at": "2026-11-20T10:00:00Z", "cleared_at": None, "node": "dgx-01", "gpu": 2, "item": "",
            "signal": "xid", "observed": {"code": 79, "user": "ada"}, "action": "drain", "outcome": "drained",
            "jobs": ["4711"],
        },
    ],
}  # fmt: skip


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "hot.toml"
    path.write_text(RULE)
    return str(path)


def test_findings_are_listed_with_what_would_have_followed(portal: SimpleNamespace, file: str) -> None:  # noqa: F811
    portal.answers["POST", "health/rules/try"] = ANSWER
    output = vigil("health", "try", file, "--days", "7").output.replace("\N{NO-BREAK SPACE}", " ")
    for text in ("dgx-01", "GPU 2", "Xid 79", "still open", "drained", "4711", "2 findings", "The first 1 are listed."):
        assert text in output
    assert "ada" not in output
    assert "No history of the signal agent is stored." in output
    assert json.loads(portal.asked[0].content) == {"toml": RULE, "days": 7}


def test_no_findings_are_reported_as_such(portal: SimpleNamespace, file: str) -> None:  # noqa: F811
    portal.answers["POST", "health/rules/try"] = ANSWER | {"found": 0, "entries": [], "untried": []}
    output = vigil("health", "try", file).output
    assert output == "The rule would have found nothing (3 of 3 nodes were read).\n"
    assert json.loads(portal.asked[0].content)["days"] == 30


def test_a_rule_that_is_refused_is_an_error(portal: SimpleNamespace, file: str) -> None:  # noqa: F811
    portal.answers["POST", "health/rules/try"] = problem(422, "The rule has no signal.")
    assert "The rule has no signal." in vigil("health", "try", file, status=1).output
    assert "31" in vigil("health", "try", file, "--days", "31", status=2).output


def test_rules_of_the_site_are_marked(portal: SimpleNamespace) -> None:  # noqa: F811
    rule = {
        "name": "hot", "severity": "warning", "action": "watch", "signals": ["gpu_samples"], "clears": "recovered",
        "title": "Hot", "is_site": True, "is_enabled": False, "problem": "",
    }  # fmt: skip
    portal.answers["GET", "health/rules"] = {"items": [rule]}
    assert "Hot (site, off)" in vigil("health", "rules").output
