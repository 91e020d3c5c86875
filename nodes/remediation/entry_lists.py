"""Count and list active health entries, the most urgent first, at a cost that does not grow with their number.

One query over an index counts them by state, decision, severity, action, rule and detail. A list then takes the newest
entries of one such group after the other until it is full, each from that index. Where a rule found the same on many
nodes, an old driver for example, that is one line.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from functools import cached_property

from django.db.models import Count, Max, QuerySet

from nodes.health.rules.rule import OUT_OF_SERVICE, SEVERITIES
from nodes.models import HealthEntry

Decision = HealthEntry.EntryDecision
State = HealthEntry.EntryState
MOST_SINGLE = 5
"""More equal entries than this are one line."""
SHOWN = 3
"""Nodes that such a line names."""


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

    @property
    def belongs_to(self) -> EntryList:
        if self.state == State.OPEN and self.decision == Decision.PROPOSED:
            return EntryList.WAITING
        return EntryList.WATCHED if self.state == State.WATCHING or self.action == "ignore" else EntryList.OPEN

    @property
    def is_one_line(self) -> bool:
        """Return whether it is listed as one: not where each node needs a decision of its own, or was drained."""
        is_shared = bool(self.detail) or (self.belongs_to != EntryList.WAITING and self.action not in OUT_OF_SERVICE)
        return is_shared and self.number > MOST_SINGLE

    def rows(self) -> QuerySet[HealthEntry]:
        rows = HealthEntry.objects.active().filter(
            state=self.state, decision=self.decision, severity=self.severity, action=self.action, rule=self.rule,
            detail=self.detail,
        )  # fmt: skip
        return rows.order_by("-last_seen")


@dataclass(frozen=True)
class ListedEntries:
    """One line of a list: an entry, or the newest of `number` equal ones."""

    entries: Sequence[HealthEntry]
    number: int = 1

    @property
    def entry(self) -> HealthEntry:
        return self.entries[0]


@dataclass(frozen=True)
class _Line:
    """A line before its entries are read: one entry, or a whole group if `pk` is None."""

    last_seen: datetime
    pk: int | None
    group: EntryGroup

    def read(self, entries: Mapping[int, HealthEntry]) -> ListedEntries | None:
        """Return the line with its entries; None if they have ended since."""
        if self.pk is not None:
            entry = entries.get(self.pk)
            return None if entry is None else ListedEntries([entry])
        newest = list(_with_relations(self.group.rows())[:SHOWN])
        return ListedEntries(newest, self.group.number) if newest else None


class ActiveEntries:
    """The entries that are not cleared, as they are when first asked for."""

    @cached_property
    def groups(self) -> list[EntryGroup]:
        """Return all groups, the most severe first, then the newest."""
        fields = ("state", "decision", "severity", "action", "rule", "detail")
        rows = HealthEntry.objects.active().order_by().values_list(*fields).annotate(Count("pk"), Max("last_seen"))
        groups = sorted((EntryGroup(*row) for row in rows), key=lambda group: group.newest, reverse=True)
        return sorted(groups, key=lambda group: -_rank(group.severity))

    def count(self, which: EntryList) -> int:
        return sum(group.number for group in self.groups if group.belongs_to == which)

    def newest(self, which: EntryList, most: int) -> list[ListedEntries]:
        """Return at most that many lines, the most severe first, then the newest."""
        found: list[_Line] = []
        for severity in reversed(SEVERITIES):
            room = most - len(found)
            if not room:
                break
            # The newest lines are among those of the groups with the newest entries, as many as there is room for.
            groups = [group for group in self.groups if group.severity == severity and group.belongs_to == which][:room]
            lines = [line for group in groups for line in _lines(group, room)]
            found += sorted(lines, key=lambda line: line.last_seen, reverse=True)[:room]
        entries = _with_relations(HealthEntry.objects.all()).in_bulk([line.pk for line in found if line.pk])
        return [listed for line in found if (listed := line.read(entries))]

    def nodes_to_repair(self, most: int) -> tuple[list[str], int]:
        """Return the first names of nodes that open entries want out of service, and how many there are."""
        # `active` lets the index of active entries serve: cleared ones are many.
        rows = HealthEntry.objects.active().filter(state=State.OPEN, action__in=OUT_OF_SERVICE)
        names = sorted(set(rows.order_by().values_list("node", flat=True)))
        return names[:most], len(names)


def _lines(group: EntryGroup, most: int) -> list[_Line]:
    """Return the lines of a group by key and time only: few of them are shown, and evidence is long."""
    if group.is_one_line:
        return [_Line(group.newest, None, group)]
    return [_Line(last_seen, pk, group) for pk, last_seen in group.rows().values_list("pk", "last_seen")[:most]]


def _with_relations(rows: QuerySet[HealthEntry]) -> QuerySet[HealthEntry]:
    return rows.select_related("gpu", "order", "decided_by").defer("progress")


def _rank(severity: str) -> int:
    return SEVERITIES.index(severity) if severity in SEVERITIES else -1
