"""Query when nodes were repaired: what happened on a node before that says nothing about it any more."""

from __future__ import annotations

from collections.abc import Collection
from datetime import datetime

from django.db.models import Max

from nodes.models import HealthEntry


def repaired_at(rules: Collection[str], since: datetime) -> dict[str, datetime]:
    """Return by node when a person or a passed burn-in last ended a finding of these rules.

    A finding that ended by itself may come back by the same evidence.
    """
    rows = HealthEntry.objects.filter(rule__in=rules, state="cleared", cleared_at__gt=since)
    decided = rows.exclude(decided_by=None, decision_reason="")
    return dict(decided.order_by().values_list("node").annotate(Max("cleared_at")))
