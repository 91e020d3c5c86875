"""Count and list active health entries, the most urgent first, at a cost that does not grow with their number.

One query over an index counts them by state, decision, severity and action. A list then takes the newest entries of one
such group after the other until it is full, each from that index.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property

from django.db.models import Count

from nodes.health.rules.rule import OUT_OF_SERVICE, SEVERITIES
from nodes.models import HealthEntry

Decision = HealthEntry.EntryDecision
State = HealthEntry.EntryState


class EntryList(StrEnum):
    """The page's lists: what waits for a decision, what is open, and what is watched or only counted."""

    WAITING = "waiting"
    OPEN = "open"
    WATCHED = "watched"


@dataclass(frozen=True)
class EntryGroup:
    """Active entries with the same state, decision, severity and action."""

    state: str
    decision: str
    severity: str
    action: str
    number: int

    @property
    def belongs_to(self) -> EntryList:
        if self.state == State.OPEN and self.decision == Decision.PROPOSED:
            return EntryList.WAITING
        return EntryList.WATCHED if self.state == State.WATCHING or self.action == "ignore" else EntryList.OPEN


class ActiveEntries:
    """The entries that are not cleared, as they are when first asked for."""

    @cached_property
    def groups(self) -> list[EntryGroup]:
        """Return all groups, the most severe first."""
        fields = ("state", "decision", "severity", "action")
        rows = HealthEntry.objects.active().order_by().values_list(*fields).annotate(Count("pk"))
        return sorted((EntryGroup(*row) for row in rows), key=lambda group: -_rank(group.severity))

    def count(self, which: EntryList) -> int:
        return sum(group.number for group in self.groups if group.belongs_to == which)

    def newest(self, which: EntryList, most: int) -> list[HealthEntry]:
        """Return at most that many entries, the most severe first, then the newest."""
        found: list[HealthEntry] = []
        for severity in reversed(SEVERITIES):
            groups = [group for group in self.groups if group.severity == severity and group.belongs_to == which]
            rows = [row for group in groups for row in self._rows(group, most - len(found))]
            rows.sort(key=lambda row: row.last_seen, reverse=True)
            found += rows[: most - len(found)]
            if len(found) == most:
                break
        return found

    def _rows(self, group: EntryGroup, most: int) -> list[HealthEntry]:
        rows = HealthEntry.objects.active().filter(
            state=group.state, decision=group.decision, severity=group.severity, action=group.action
        )
        return list(rows.select_related("gpu", "order", "decided_by").defer("progress").order_by("-last_seen")[:most])

    def nodes_to_repair(self, most: int) -> tuple[list[str], int]:
        """Return the first names of nodes that open entries want out of service, and how many there are."""
        # `active` lets the index of active entries serve: cleared ones are many.
        rows = HealthEntry.objects.active().filter(state=State.OPEN, action__in=OUT_OF_SERVICE)
        names = sorted(set(rows.order_by().values_list("node", flat=True)))
        return names[:most], len(names)


def _rank(severity: str) -> int:
    return SEVERITIES.index(severity) if severity in SEVERITIES else -1
