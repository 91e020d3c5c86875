"""Compute on how many machines a shared file system was slow at a past moment: its events tell, machine by machine."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime

from django.db.models import Q

from nodes.models import Agent, NodeEvent
from nodes.monitoring.reported import mounted

MAX_CHANGES = 100
"""Moments within one event at which the share is computed anew."""


@dataclass(frozen=True)
class MountHistory:
    """Beginnings and ends of slowness by source, in order, and how many machines mount it today."""

    begins: dict[str, list[float]] = field(default_factory=dict)
    ends: dict[str, list[float]] = field(default_factory=dict)
    machines: Counter[str] = field(default_factory=Counter)

    @classmethod
    def read(cls, start: datetime, end: datetime, most: int) -> MountHistory:
        """Read at most `most` events that lasted at some moment between start and end."""
        machines: Counter[str] = Counter()
        for agent in Agent.objects.filter(is_made_up=False).only("facts"):
            machines.update(set(mounted(agent).values()))
        lasted = Q(is_open=True) | Q(last_at__gte=start)
        rows = NodeEvent.objects.filter(lasted, kind="mount.slow", at__lte=end, agent__is_made_up=False).only(
            "at", "last_at", "is_open", "data"
        )
        begins: defaultdict[str, list[float]] = defaultdict(list)
        ends: defaultdict[str, list[float]] = defaultdict(list)
        for row in rows.order_by("-at")[:most]:
            if not row.is_planted:
                source = source_of(row)
                begins[source].append(row.at.timestamp())
                ends[source].append((end if row.is_open else row.last_at).timestamp())
        return cls(_sorted(begins), _sorted(ends), machines)

    def share(self, row: NodeEvent, at: float) -> float:
        """Return on which share of the machines with this event's file system it was slow at this moment."""
        source = source_of(row)
        began = bisect_right(self.begins.get(source, []), at)
        slow = began - bisect_left(self.ends.get(source, []), at)
        return min(1.0, max(1, slow) / max(1, self.machines[source], slow))

    def changes(self, row: NodeEvent, ended: float) -> set[float]:
        """Return moments within the event at which the share changed, evenly chosen if there are many."""
        source, began = source_of(row), row.at.timestamp()
        found = sorted({at for times in (self.begins, self.ends) for at in times.get(source, ()) if began < at < ended})
        pace = -(-len(found) // MAX_CHANGES) or 1
        return set(found[::pace]) | set(found[-1:])


def source_of(row: NodeEvent) -> str:
    """Return what is mounted, which identifies a file system across machines; its path if that is unknown."""
    return str(row.data.get("source") or row.data.get("mount") or "")


def _sorted(times: Mapping[str, list[float]]) -> dict[str, list[float]]:
    return {source: sorted(values) for source, values in times.items()}
