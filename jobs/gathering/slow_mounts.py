"""Query when a shared mount was slow on a job's nodes, by time and by the steps done meanwhile."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import numpy as np
from django.db.models import Q

from jobs.gathering import charts
from jobs.gathering.job_life import JobLife
from jobs.intake.reports import owner_of
from jobs.models import Attempt
from nodes.models import NodeEvent
from portal.series import read, store
from vigil_core import formatting, untrusted

MAX_EVENTS = 500  # of all its nodes
MAX_SHOWN = 50
NODES = 512
POINTS = 1_000

_Row = tuple[str, dict[str, Any], datetime, datetime, bool]  # node, data, start, end, whether it is ongoing


@dataclass
class SlowMountSpan:
    """A time during which a mount was slow on at least one of the job's nodes."""

    mount: str
    at: datetime
    until: datetime
    attempt: Attempt

    @property
    def text(self) -> str:
        return f"{self.mount} was slow for {formatting.rough((self.until - self.at).total_seconds())}"


def find(life: JobLife) -> list[SlowMountSpan]:
    """Return slow mounts of all attempts, oldest first.

    The same mount at the same time on several nodes counts once.
    """
    ran = [attempt for attempt in life.attempts if attempt.started_at and attempt.nodes]
    rows = _rows(life, ran) if ran else []
    return [slow for attempt in ran for slow in _joined(_of_attempt(life, attempt, rows))][-MAX_SHOWN:]


def by_step(life: JobLife, slow: Iterable[SlowMountSpan]) -> list[list[object]]:
    """Return [first step, last step, text] for each, by the times of the attempt's steps."""
    curves: dict[int, read.Curve | None] = {}
    marked: list[list[object]] = []
    for mount in slow:
        if mount.attempt.pk not in curves:
            curves[mount.attempt.pk] = _progress_curve(mount.attempt)
        curve = curves[mount.attempt.pk]
        if curve is not None and len(curve.step) > 1:
            moments = [mount.at.timestamp(), mount.until.timestamp()]
            first, last = np.interp(moments, curve.time, curve.step.astype(np.float64)).tolist()
            if last > first:
                marked.append([first, last, mount.text])
    return marked


def _rows(life: JobLife, attempts: Sequence[Attempt]) -> list[_Row]:
    """Return the newest slow-mount events on the attempts' nodes while the attempts ran, oldest first."""
    began = min(attempt.started_at for attempt in attempts if attempt.started_at)
    ended = max(attempt.ended_at or life.now for attempt in attempts)
    nodes = {node for attempt in attempts for node in attempt.nodes[:NODES]}
    there = NodeEvent.objects.filter(kind="mount.slow", agent__node__in=nodes, at__lt=ended)
    rows = there.filter(Q(is_open=True) | Q(last_at__gt=began)).order_by("-at")
    return list(rows.values_list("agent__node", "data", "at", "last_at", "is_open")[:MAX_EVENTS])[::-1]


def _of_attempt(life: JobLife, attempt: Attempt, rows: Iterable[_Row]) -> Iterator[SlowMountSpan]:
    began, ended, nodes = attempt.started_at, attempt.ended_at or life.now, set(attempt.nodes[:NODES])
    for node, data, at, last_at, is_open in rows:
        is_planted = data.get("planted_until") is not None  # by a game day
        if began and node in nodes and at < ended and (is_open or last_at > began) and not is_planted:
            mount = untrusted.line(data.get("mount"), 72) or "A shared mount"
            yield SlowMountSpan(mount, max(at, began), min(life.now if is_open else last_at, ended), attempt)


def _joined(rows: Iterable[SlowMountSpan]) -> list[SlowMountSpan]:
    joined: list[SlowMountSpan] = []
    last: dict[str, SlowMountSpan] = {}
    for mount in rows:
        before = last.get(mount.mount)
        if before is not None and mount.at <= before.until:
            before.until = max(before.until, mount.until)
            continue
        last[mount.mount] = mount
        joined.append(mount)
    return joined


def _progress_curve(attempt: Attempt) -> read.Curve | None:
    """Return the attempt's throughput, or else its loss."""
    owner = owner_of(attempt.pk)
    names = store.names([owner])
    name = next((name for name in (*charts.SPEEDS, "loss") if name in names), None)
    return read.curve([owner], name, points=POINTS) if name else None
