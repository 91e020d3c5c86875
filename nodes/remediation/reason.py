"""Write the reason that the scheduler shows for a drain by a health rule: `[node] Xid 79 on GPU 0`."""

from __future__ import annotations

from nodes.models import HealthEntry
from nodes.monitoring.evaluate import PLANTED
from nodes.monitoring.site_rules import rules_in_force

NODE, USER = "[node]", "[user]"
"""Begin reasons about the machine itself, and about what a user's programs left behind."""
MAX_CHARACTERS = 150


def drain_reason(entry: HealthEntry) -> str:
    """Return what was observed and where, without the rule, which the requester names."""
    rule = rules_in_force().get(entry.rule)
    tag = USER if rule is not None and rule.blames == "user" else NODE
    planted = PLANTED if entry.is_planted else ""
    text = f"{tag} {_signal(entry).removesuffix(planted)}{_where(entry)}"
    return text[: MAX_CHARACTERS - len(planted)] + planted


def _signal(entry: HealthEntry) -> str:
    """Return the newest Xid or SXid among the evidence, which says more than the rule's title."""
    for _, signal, fields, _ in reversed(entry.observations()):
        if signal in ("xid", "sxid") and "code" in fields and not fields.get("is_implied"):
            return f"{'Xid' if signal == 'xid' else 'SXid'} {fields['code']}"
    return entry.title


def _where(entry: HealthEntry) -> str:
    if entry.gpu is not None:
        return f" on GPU {entry.gpu.index}"
    return f" ({entry.item})" if entry.item else ""
