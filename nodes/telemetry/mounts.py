"""Shared file systems: one that was slow on several machines at once is one event of the cluster, not one a machine."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

from django.db.models import Q
from django.utils import timezone

from nodes.models import NodeEvent
from nodes.models.telemetry import SILENT
from vigil_core import formatting, untrusted

TOGETHER = timedelta(minutes=2)
FEWEST = 2  # machines
MOST = 20_000  # rows of one look
LONGEST = timedelta(days=7)  # what began before is not looked for
_FIELDS = ("agent__node", "data", "at", "last_at", "is_open", "agent__heard_at")


@dataclass(frozen=True)
class SlowMount:
    """A mount that one machine found slow, from when until when (None: it still is)."""

    node: str
    mount: str
    source: str
    at: datetime
    until: datetime | None


@dataclass
class SlowFileSystem:
    """A shared file system that was slow on several machines."""

    key: str
    mounts: list[str] = field(default_factory=list)
    nodes: list[str] = field(default_factory=list)
    at: datetime = datetime.min.replace(tzinfo=UTC)
    last_began: datetime = datetime.min.replace(tzinfo=UTC)
    until: datetime | None = None
    _known: set[str] = field(default_factory=set, repr=False, compare=False)  # nodes and mounts, for a thousand of them

    @property
    def name(self) -> str:
        """What people call it: the server of "nfs01:/export", else the whole source or path."""
        server, _, path = self.key.partition(":")
        return server if server and path.startswith("/") else self.key

    @property
    def is_open(self) -> bool:
        return self.until is None

    def lasted_s(self, now: datetime) -> float:
        return max(0.0, ((self.until or now) - self.at).total_seconds())

    def text(self, now: datetime) -> str:
        """ "nfs01 was slow for 11 min on 12 nodes", or has been."""
        was = "has been" if self.is_open else "was"
        lasted, nodes = formatting.rough(self.lasted_s(now)), formatting.plural(len(self.nodes), "node")
        return f"{self.name} {was} slow for {lasted} on {nodes}"


def between(start: datetime, end: datetime, *, node: str = "", now: datetime | None = None) -> list[SlowFileSystem]:
    """What was slow in this stretch of time, newest first; with `node`, what that machine suffered from, too."""
    overlap = Q(is_open=True) | Q(last_at__gte=start)
    found = NodeEvent.objects.filter(overlap, kind="mount.slow", at__lt=end, at__gte=start - LONGEST)
    rows = found.order_by("-at").values_list(*_FIELDS)[:MOST]
    silent = (now or timezone.now()) - SILENT
    events = together(_slow_mount(row, silent) for row in rows)
    return [event for event in reversed(events) if not node or node in event.nodes]


def together(rows: Iterable[SlowMount]) -> list[SlowFileSystem]:
    """Machines that found the same file system slow within two minutes, or while others did; oldest first.

    The same is what has the same source; of a machine that tells none, the same path.
    """
    rows = sorted(rows, key=lambda row: row.at)
    sources = _sources_by_path(rows)
    events: dict[str, list[SlowFileSystem]] = defaultdict(list)
    for row in rows:
        key = row.source or sources.get(row.mount) or row.mount
        event = next((one for one in reversed(events[key]) if _belongs(row, one)), None)
        if event is None:
            event = SlowFileSystem(key, at=row.at, until=row.at)
            events[key].append(event)
        _add(event, row)
    several = [one for of_key in events.values() for one in of_key if len(one.nodes) >= FEWEST]
    return sorted(several, key=lambda one: (one.at, one.key))


def _sources_by_path(rows: Sequence[SlowMount]) -> dict[str, str]:
    """The source that most machines mount at a path."""
    counted: dict[str, Counter[str]] = defaultdict(Counter)
    for row in rows:
        if row.source:
            counted[row.mount][row.source] += 1
    return {path: min(sources, key=lambda one: (-sources[one], one)) for path, sources in counted.items()}


def _belongs(row: SlowMount, event: SlowFileSystem) -> bool:
    if row.at - event.last_began <= TOGETHER:
        return True
    return len(event.nodes) >= FEWEST and (event.until is None or row.at <= event.until)


def _add(event: SlowFileSystem, row: SlowMount) -> None:
    for there, one in ((event.nodes, f"node {row.node}"), (event.mounts, f"mount {row.mount}")):
        if one not in event._known:
            event._known.add(one)
            there.append(one.partition(" ")[2])
    event.last_began = row.at
    event.until = None if event.until is None or row.until is None else max(event.until, row.until)


def _slow_mount(row: Sequence[Any], silent: datetime) -> SlowMount:
    """A row as it was told by a machine, whatever it told; of one that fell silent nobody knows that it still is."""
    node, data, at, last_at, is_open, heard_at = row
    until = last_at
    if is_open:
        until = None if heard_at and heard_at >= silent else max(last_at, heard_at or last_at)
    return SlowMount(node, untrusted.line(data.get("mount")), untrusted.line(data.get("source")), at, until)
