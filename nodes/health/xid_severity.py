"""Rank Xids by the shipped health rules, for what knows an Xid's number only: headlines and counters."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

from nodes.health.rules.catalogue import shipped_rules
from nodes.health.rules.rule import SEVERITIES, Severity, Trigger

UNLISTED: Severity = "warning"
"""Of an Xid that no rule names, because drivers add new ones, or that only counts when it happens repeatedly."""


def xid_severity(code: int | None) -> Severity:
    """Return the highest severity of the findings that one Xid of this number may open."""
    return UNLISTED if code is None else _severities().get(code, UNLISTED)


def is_critical_xid(code: int) -> bool:
    """Return whether the GPU or its node needs a reset, a reboot or a repair after one Xid of this number."""
    return xid_severity(code) in ("critical", "fatal")


def xid_codes(trigger: Trigger) -> frozenset[int]:
    """Return the Xids that a trigger names."""
    condition = trigger.where.get("code")
    if trigger.signal.name != "xid" or condition is None or not isinstance(condition.operand, tuple):
        return frozenset()
    return frozenset(code for code in condition.operand if isinstance(code, int))


@cache
def _severities() -> Mapping[int, Severity]:
    found: dict[int, Severity] = {}
    for rule in sorted(shipped_rules().values(), key=lambda rule: SEVERITIES.index(rule.severity)):
        for trigger in filter(_is_met_at_once, rule.triggers):
            found |= dict.fromkeys(xid_codes(trigger), rule.severity)
    return found


def _is_met_at_once(trigger: Trigger) -> bool:
    """Return whether one Xid may suffice. What only a fatal NVLink error does is left out: most are not fatal."""
    is_fatal = trigger.where.get("is_fatal")
    return trigger.count == 1 and (is_fatal is None or is_fatal.holds(False))
