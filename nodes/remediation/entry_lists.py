"""Count and list active health entries, the most urgent first, at a cost that does not grow with their number.

One query over an index counts them by state, decision, severity, action, rule and detail. A list then takes the keys of
the newest entries from the same index, and reads only those. Where a rule found the same on many nodes, an old driver
for example, that is one line.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from functools import cached_property

from django.db.models import Case, Count, Max, Q, QuerySet, When

from nodes.health.rules.rule import OUT_OF_SERVICE, SEVERITIES
from nodes.models import HealthEntry

Decision = HealthEntry.EntryDecision
State = HealthEntry.EntryState
MAX_SINGLE = 5
"""More equal entries than this are one line."""


def _rank(severity: str) -> int:
    return SEVERITIES.index(severity) if severity in SEVERITIES else -1


_RANK = Case(*(When(severity=name, then=_rank(name)) for name in SEVERITIES), default=-1)


def is_shared(detail: str, action: str, *, is_waiting: bool) -> bool:
    """Return whether one decision may be about all entries of a rule that are alike: `detail` says what they share."""
    return bool(detail) or not (is_waiting or action in OUT_OF_SERVICE)


class EntryList(StrEnum):
    """The page's lists: what waits for a decision, what is open, and what is watched or only counted."""

    WAITING = "waiting"
    OPEN = "open"
    WATCHED = "watched"


@dataclass(frozen=True)
class EntryGroup:
    """Active entries with the same state, decision, severity and action, whose rule found the same."""

    state: str
    decision: str
    severity: str
    action: str
    rule: str
    detail: str
    number: int
    newest: datetime
    sample: int
    """The key of one of them."""

    @property
    def belongs_to(self) -> EntryList:
        if self.state == State.OPEN and self.decision == Decision.PROPOSED:
            return EntryList.WAITING
        return EntryList.WATCHED if self.state == State.WATCHING or self.action == "ignore" else EntryList.OPEN

    @property
    def is_one_line(self) -> bool:
        """Return whether it is listed as one: not where each node needs a decision of its own, or was drained."""
        is_waiting = self.belongs_to == EntryList.WAITING
        return self.number > MAX_SINGLE and is_shared(self.detail, self.action, is_waiting=is_waiting)


@dataclass(frozen=True)
class ListedEntries:
    """One line of a list: an entry, or one of `number` equal ones."""

    entry: HealthEntry
    number: int = 1


class ActiveEntries:
    """The entries that are not cleared, as they are when first asked for."""

    @cached_property
    def groups(self) -> list[EntryGroup]:
        """Return all groups, the most severe first, then the newest."""
        fields = ("state", "decision", "severity", "action", "rule", "detail")
        rows = (
            HealthEntry.objects.active()
            .order_by()
            .values_list(*fields)
            .annotate(Count("pk"), Max("last_seen"), Max("pk"))
        )
        groups = sorted((EntryGroup(*row) for row in rows), key=lambda group: group.newest, reverse=True)
        return sorted(groups, key=lambda group: -_rank(group.severity))

    def count(self, which: EntryList) -> int:
        return sum(group.number for group in self.groups if group.belongs_to == which)

    def newest(self, which: EntryList, most: int) -> list[ListedEntries]:
        """Return at most that many lines, the most severe first, then the newest. Two queries, whatever there is."""
        groups = [group for group in self.groups if group.belongs_to == which]
        if not groups:
            return []
        keys = [
            (_rank(group.severity), group.newest, group.sample, group.number) for group in groups if group.is_one_line
        ]
        keys += [(rank, last_seen, pk, 1) for rank, last_seen, pk in _newest_keys(groups, most)]
        keys.sort(reverse=True)
        rows = HealthEntry.objects.select_related("gpu", "order__asked_by", "decided_by").defer("progress")
        entries = rows.in_bulk([pk for _, _, pk, _ in keys[:most]])
        return [ListedEntries(entries[pk], number) for _, _, pk, number in keys[:most] if pk in entries]

    def nodes_to_repair(self, most: int) -> tuple[list[str], int]:
        """Return the first names of nodes that open entries want out of service, and how many there are."""
        # `active` lets the index of active entries serve: cleared ones are many.
        rows = HealthEntry.objects.active().filter(state=State.OPEN, action__in=OUT_OF_SERVICE)
        names = sorted(set(rows.order_by().values_list("node", flat=True)))
        return names[:most], len(names)


def active_of_node(node: str) -> QuerySet[HealthEntry]:
    """Select a node's active entries: what waits for a decision, what is open, what is watched; the worst first."""
    waits = Q(state=State.OPEN, decision=Decision.PROPOSED)
    place = Case(When(waits, then=0), When(Q(state=State.WATCHING) | Q(action="ignore"), then=2), default=1)
    rows = HealthEntry.objects.active().filter(node=node).select_related("gpu", "order__asked_by", "decided_by")
    return rows.defer("progress").order_by(place, _RANK.desc(), "-last_seen")


def _newest_keys(groups: Sequence[EntryGroup], most: int) -> list[tuple[int, datetime, int]]:
    """Return rank, time and key of the newest entries of the groups that are not one line, from the index alone."""
    wanted = Q()
    for kind in {(group.state, group.decision, group.action) for group in groups if not group.is_one_line}:
        wanted |= Q(state=kind[0], decision=kind[1], action=kind[2])
    if not wanted:
        return []
    rows = HealthEntry.objects.active().filter(wanted).annotate(rank=_RANK)
    for group in groups:
        if group.is_one_line:
            rows = rows.exclude(
                state=group.state,
                decision=group.decision,
                severity=group.severity,
                action=group.action,
                rule=group.rule,
                detail=group.detail,
            )
    return list(rows.order_by("-rank", "-last_seen").values_list("rank", "last_seen", "pk")[:most])
