"""Group slow mounts: a shared file system that was slow on several machines is one event of the cluster."""

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
MIN_NODES = 2
MAX_ROWS = 20_000
MAX_AGE = timedelta(days=7)  # older beginnings are not searched
_FIELDS = ("agent__node", "data", "at", "last_at", "is_open", "agent__heard_at")


@dataclass(frozen=True)
class SlowMount:
    """A mount that one machine found slow, from `at` until `until` (None: it still is)."""

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
    _members: set[str] = field(
        default_factory=set, repr=False, compare=False
    )  # nodes and mounts as a set: there may be thousands

    @property
    def name(self) -> str:
        """Return its usual name: the server of "nfs01:/export", else the whole source or path."""
        server, _, path = self.key.partition(":")
        return server if server and path.startswith("/") else self.key

    @property
    def is_open(self) -> bool:
        return self.until is None

    def lasted_s(self, now: datetime) -> float:
        return max(0.0, ((self.until or now) - self.at).total_seconds())

    def text(self, now: datetime) -> str:
        """Return "nfs01 was slow for 11 min on 12 nodes", or "has been slow …" while it lasts."""
        was = "has been" if self.is_open else "was"
        lasted, nodes = formatting.rough(self.lasted_s(now)), formatting.plural(len(self.nodes), "node")
        return f"{self.name} {was} slow for {lasted} on {nodes}"


def between(start: datetime, end: datetime, *, node: str = "", now: datetime | None = None) -> list[SlowFileSystem]:
    """Return what was slow in this time span, newest first; with `node`, only what that machine was affected by."""
    overlap = Q(is_open=True) | Q(last_at__gte=start)
    found = NodeEvent.objects.filter(overlap, kind="mount.slow", at__lt=end, at__gte=start - MAX_AGE)
    rows = found.order_by("-at").values_list(*_FIELDS)[:MAX_ROWS]
    silent = (now or timezone.now()) - SILENT
    events = together(_slow_mount(row, silent) for row in rows)
    return [event for event in reversed(events) if not node or node in event.nodes]


def together(rows: Iterable[SlowMount]) -> list[SlowFileSystem]:
    """Group mounts of the same file system that became slow within two minutes, or while others were; oldest first.

    Mounts with the same source are the same; without a source, those with the same path.
    """
    rows = sorted(rows, key=lambda row: row.at)
    sources = _sources_by_path(rows)
    events: dict[str, list[SlowFileSystem]] = defaultdict(list)
    for row in rows:
        key = row.source or sources.get(row.mount) or row.mount
        event = next((event for event in reversed(events[key]) if _belongs(row, event)), None)
        if event is None:
            event = SlowFileSystem(key, at=row.at, until=row.at)
            events[key].append(event)
        _add(event, row)
    several = [event for events_of_key in events.values() for event in events_of_key if len(event.nodes) >= MIN_NODES]
    return sorted(several, key=lambda event: (event.at, event.key))


def _sources_by_path(rows: Sequence[SlowMount]) -> dict[str, str]:
    """Return the source that most machines mount at a path."""
    counted: dict[str, Counter[str]] = defaultdict(Counter)
    for row in rows:
        if row.source:
            counted[row.mount][row.source] += 1
    return {path: min(sources, key=lambda source: (-sources[source], source)) for path, sources in counted.items()}


def _belongs(row: SlowMount, event: SlowFileSystem) -> bool:
    if row.at - event.last_began <= TOGETHER:
        return True
    return len(event.nodes) >= MIN_NODES and (event.until is None or row.at <= event.until)


def _add(event: SlowFileSystem, row: SlowMount) -> None:
    for names, member in ((event.nodes, f"node {row.node}"), (event.mounts, f"mount {row.mount}")):
        if member not in event._members:
            event._members.add(member)
            names.append(member.partition(" ")[2])
    event.last_began = row.at
    event.until = None if event.until is None or row.until is None else max(event.until, row.until)


def _slow_mount(row: Sequence[Any], silent: datetime) -> SlowMount:
    """Convert a row with untrusted data; on a machine that fell silent it is not known to be slow still."""
    node, data, at, last_at, is_open, last_report_at = row
    until = last_at
    if is_open:
        until = None if last_report_at and last_report_at >= silent else max(last_at, last_report_at or last_at)
    return SlowMount(node, untrusted.line(data.get("mount")), untrusted.line(data.get("source")), at, until)
