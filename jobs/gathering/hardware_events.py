"""Query hardware errors of a job's GPUs while they were allocated to it: Xids, and GPUs that fell off the bus."""

from __future__ import annotations

from datetime import datetime

from jobs import allocations
from jobs.models import Attempt
from nodes.models import NodeEvent
from nodes.presenting.events import ECHO, words
from vigil_core import formatting

KINDS = ("xid", "gpu.lost")
MAX_READ = 200
MAX_SHOWN = 5

Spans = dict[int, list[tuple[datetime, datetime]]]  # since and until, by GPU


def recent_events(attempt: Attempt, now: datetime) -> list[tuple[datetime, str]]:
    """Return (time, text) of the newest few, oldest first. An echo is left out if its cause is listed."""
    holdings = allocations.allocated_to([attempt]).get(attempt.pk, [])
    if not holdings:
        return []
    spans: Spans = {}
    for holding in holdings:  # twice if it was suspended or released a GPU
        spans.setdefault(holding.gpu_id, []).append((holding.since, holding.until or attempt.ended_at or now))
    began = min(holding.since for holding in holdings)
    ended = max(until for gpu_spans in spans.values() for _, until in gpu_spans)
    rows = NodeEvent.objects.filter(gpu__in=spans, kind__in=KINDS, at__lte=ended, last_at__gte=began)
    events = [
        event
        for event in rows.select_related("gpu", "agent").order_by("-at")[:MAX_READ]
        if _happened_within(event, spans) and not event.is_planted
    ]
    if any(event.code != ECHO for event in events):
        events = [event for event in events if event.code != ECHO]
    return [(event.at, _describe(event)) for event in reversed(events[:MAX_SHOWN])]


def _happened_within(event: NodeEvent, spans: Spans) -> bool:
    return any(event.at <= until and event.last_at >= since for since, until in spans[event.gpu_id or 0])


def _describe(event: NodeEvent) -> str:
    where = f"GPU {event.gpu.index} of {event.agent.node}" if event.gpu else event.agent.node
    if event.kind == "gpu.lost":
        return f"{where} was lost"
    times = f", {formatting.count(event.count)} times" if event.count > 1 else ""
    return f"{words(event.kind, event.code, '', {}).title} ({where}{times})"
