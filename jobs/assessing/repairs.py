"""Query when nodes were repaired: what happened on a node before that says nothing about it any more."""

from __future__ import annotations

from datetime import datetime

from django.db.models import Max

from nodes.models import HealthEntry
from nodes.monitoring.site_rules import rules_in_force


def rules_on(signal: str) -> list[str]:
    """Return the names of the shipped rules and the site's that judge this signal."""
    return [rule.name for rule in rules_in_force().values() if signal in rule.signals]


def repaired_at(signal: str, since: datetime) -> dict[str, datetime]:
    """Return by node when a person or a passed burn-in last ended a finding of this signal.

    A finding that ended by itself may come back by the same evidence.
    """
    rows = HealthEntry.objects.filter(rule__in=rules_on(signal), state="cleared", cleared_at__gt=since)
    decided = rows.exclude(decided_by=None, decision_reason="")
    return dict(decided.order_by().values_list("node").annotate(Max("cleared_at")))
