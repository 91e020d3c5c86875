"""Decide about many equal findings at once: one rule found the same on many nodes, such as an old driver."""

from __future__ import annotations

import time
from dataclasses import dataclass

from django.db import transaction
from django.db.models import QuerySet
from django.utils import timezone

from nodes.cluster import drain
from nodes.models import HealthControl, HealthEntry
from nodes.remediation import inbox
from nodes.remediation.entry_lists import is_shared
from portal.access import note
from portal.audit import Change
from portal.bulk import give_way
from portal.models import User
from vigil_core import formatting

MAX_DISMISSED = 2_000
"""Entries that one decision dismisses, in one statement; the rest takes another."""
MAX_DECIDED_SINGLY = 200
"""Entries that one decision approves or clears: each takes about eight statements."""
AT_ONCE = 20
"""Entries per transaction, so that other writers do not wait long."""
Decision = HealthEntry.EntryDecision
State = HealthEntry.EntryState


@dataclass(frozen=True)
class AlikeOutcome:
    """How many of the equal entries were decided along with the first, and how many were left unchanged."""

    decided: int
    left: int


def alike(entry: HealthEntry) -> QuerySet[HealthEntry]:
    """Select the other active entries in whose evidence the rule found the same, and that are in the same state."""
    rows = HealthEntry.objects.active().filter(
        state=entry.state, decision=entry.decision, severity=entry.severity, action=entry.action, rule=entry.rule,
        detail=entry.detail,
    )  # fmt: skip
    return rows.exclude(pk=entry.pk).order_by("pk")


def decide(user: User, action: str, pk: int, reason: str) -> AlikeOutcome:
    """Decide about the entry and those like it. Raises what the decision about the first one raises."""
    first = HealthEntry.objects.filter(pk=pk).first()
    if first is None:
        raise HealthEntry.DoesNotExist(f"There is no finding {pk}.")
    is_waiting = first.state == State.OPEN and first.decision == Decision.PROPOSED
    if not is_shared(first.detail, first.action, is_waiting=is_waiting):
        raise inbox.NotPossible(
            f"Decide about each finding separately: {first.rule} may have a different cause on each node."
        )
    others = alike(first).order_by("node", "pk")  # nodes are locked by name, as bulk drains do
    if action == "dismiss":
        inbox.dismiss(user, pk, reason)
        return _dismiss(user, others, first, reason)
    single = inbox.approve if action == "approve" else inbox.clear
    pks = list(others.values_list("pk", flat=True)[:MAX_DECIDED_SINGLY])
    single(user, pk, reason)
    decided = 0
    for start in range(0, len(pks), AT_ONCE):
        began = time.monotonic()
        with transaction.atomic():
            for other in pks[start : start + AT_ONCE]:
                try:
                    single(user, other, reason)
                except (inbox.NotPossible, drain.NotOrdered, HealthEntry.DoesNotExist):
                    continue
                decided += 1
        if start + AT_ONCE < len(pks):
            give_way(began)
    return AlikeOutcome(decided, len(pks) - decided)


def _dismiss(user: User, others: QuerySet[HealthEntry], first: HealthEntry, reason: str) -> AlikeOutcome:
    """Dismiss all in one statement, with one entry in the audit log."""
    with transaction.atomic():
        HealthControl.locked()
        pks = list(others.values_list("pk", flat=True)[:MAX_DISMISSED])
        rows = HealthEntry.objects.filter(pk__in=pks, state=first.state)
        decided = rows.update(
            state=State.DISMISSED, decision=Decision.DISMISSED, decided_by=user, decided_at=timezone.now(),
            decision_reason=reason,
        )  # fmt: skip
        inbox.withdraw_drains(pks)
        if decided:
            what = formatting.plural(decided, "more finding")
            change = Change(before={"state": first.state}, after={"state": State.DISMISSED, "entries": decided})
            note(user, f"finding.{State.DISMISSED}", f"{first.rule}: {what} like that on {first.node}", reason, change)
    return AlikeOutcome(decided, len(pks) - decided)
