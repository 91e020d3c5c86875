"""What befell the GPUs of a job while it held them: Xids, and those that fell off the bus."""

from __future__ import annotations

from datetime import datetime

from jobs import allocations
from jobs.models import Attempt
from nodes.models import NodeEvent
from nodes.presenting.events import ECHO, words
from vigil_core import formatting

KINDS = ("xid", "gpu.lost")
MOST = 200
SHOWN = 5

Spans = dict[int, list[tuple[datetime, datetime]]]  # since and until, by GPU


def of(attempt: Attempt, now: datetime) -> list[tuple[datetime, str]]:
    """(when, in words) of the newest few, oldest first. An echo is left out where what it echoes is there."""
    held = allocations.held_by([attempt]).get(attempt.pk, [])
    if not held:
        return []
    spans: Spans = {}
    for one in held:  # twice where it was suspended, or let go of a GPU
        spans.setdefault(one.gpu_id, []).append((one.since, one.until or attempt.ended_at or now))
    began = min(one.since for one in held)
    ended = max(until for each in spans.values() for _, until in each)
    rows = NodeEvent.objects.filter(gpu__in=spans, kind__in=KINDS, at__lte=ended, last_at__gte=began)
    found = [one for one in rows.select_related("gpu", "agent").order_by("-at")[:MOST] if _is_of(one, spans)]
    if any(one.code != ECHO for one in found):
        found = [one for one in found if one.code != ECHO]
    return [(one.at, _said(one)) for one in reversed(found[:SHOWN])]


def _is_of(event: NodeEvent, spans: Spans) -> bool:
    return any(event.at <= until and event.last_at >= since for since, until in spans[event.gpu_id or 0])


def _said(event: NodeEvent) -> str:
    where = f"GPU {event.gpu.index} of {event.agent.node}" if event.gpu else event.agent.node
    if event.kind == "gpu.lost":
        return f"{where} was lost"
    times = f", {formatting.count(event.count)} times" if event.count > 1 else ""
    return f"{words(event.kind, event.code, '', {}).title} ({where}{times})"
