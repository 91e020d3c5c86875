"""`vigil health try` shows what a rule would have found, and `vigil health rules` also the site's rules."""

from __future__ import annotations

from vigil_cli.health import _dry_run_lines, _rule_lines

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


def test_findings_are_listed_with_what_would_have_followed() -> None:
    lines = "\n".join(_dry_run_lines(ANSWER)).replace("\N{NO-BREAK SPACE}", " ")
    for text in ("dgx-01", "GPU 2", "Xid 79", "still open", "drained", "4711", "2 findings", "The first 1 are listed."):
        assert text in lines
    assert "ada" not in lines
    assert "No history of the signal agent is stored." in lines


def test_nothing_found_is_said() -> None:
    nothing = ANSWER | {"found": 0, "entries": [], "untried": []}
    assert _dry_run_lines(nothing) == ["The rule would have found nothing (3 of 3 nodes were read)."]


def test_rules_of_the_site_are_marked() -> None:
    rule = {
        "name": "hot", "severity": "warning", "action": "watch", "signals": ["gpu_samples"], "clears": "recovered",
        "title": "Hot", "is_site": True, "is_enabled": False, "problem": "",
    }  # fmt: skip
    assert "Hot (site, off)" in "\n".join(_rule_lines({"items": [rule]}))
