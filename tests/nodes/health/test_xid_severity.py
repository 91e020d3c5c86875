"""Test how severe an Xid is if only its number is known."""

from __future__ import annotations

import pytest

from nodes.health import engine
from nodes.health.progress import Observation, RuleProgress, Subject
from nodes.health.rules.catalogue import shipped_rules
from nodes.health.rules.rule import SEVERITIES
from nodes.health.xid_severity import is_critical_xid, xid_severity


@pytest.mark.parametrize("code", range(1, 180))
def test_the_severity_of_an_xid_is_that_of_the_findings_it_opens(code: int) -> None:
    opened = set()
    for rule in shipped_rules().values():
        for recovery in ("none", "reset", "reboot"):
            progress = RuleProgress()
            fields = {"code": code, "is_fatal": False, "is_listed": True, "is_echo": False, "recovery": recovery}
            engine.observe(rule, progress, Observation("xid", Subject("dgx-01", "GPU-1"), 0.0, fields))
            if progress.state == "open":
                opened.add(rule.severity)
    assert xid_severity(code) == max(opened, key=SEVERITIES.index, default="warning")


@pytest.mark.parametrize(("code", "severity"), [
    (79, "fatal"), (157, "critical"), (74, "critical"), (145, "warning"), (92, "warning"), (94, "warning"),
    (161, "info"), (44, "info"), (13, "info"), (999, "warning"), (None, "warning"),
])  # fmt: skip
def test_severities_of_some_xids(code: int | None, severity: str) -> None:
    assert xid_severity(code) == severity


def test_what_needs_a_repair() -> None:
    assert [code for code in (13, 48, 92, 119, 145, 157, 161) if is_critical_xid(code)] == [48, 119, 157]
