"""When a shared mount was slow on the nodes of a job, by time and by the steps that were done meanwhile."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import numpy as np
from django.db.models import Q

from jobs.gathering import charts
from jobs.intake.reports import owner_of
from jobs.models import Attempt
from jobs.presenting.header import Life
from nodes.models import NodeEvent
from portal.series import read, store
from vigil_core import formatting, untrusted

MOST = 500  # events of all its nodes
SHOWN = 50
NODES = 512
POINTS = 1_000

_Row = tuple[str, dict[str, Any], datetime, datetime, bool]  # node, data, from when to when, whether it lasts


@dataclass
class Slow:
    """A mount that was slow on at least one of its nodes."""

    mount: str
    at: datetime
    until: datetime
    attempt: Attempt

    @property
    def text(self) -> str:
        return f"{self.mount} was slow for {formatting.rough((self.until - self.at).total_seconds())}"


def of(life: Life) -> list[Slow]:
    """Of all its attempts, oldest first; the same mount at the same time on several nodes is one."""
    ran = [one for one in life.attempts if one.started_at and one.nodes]
    rows = _rows(life, ran) if ran else []
    return [slow for attempt in ran for slow in _joined(_of_attempt(life, attempt, rows))][-SHOWN:]


def by_step(life: Life, slow: Iterable[Slow]) -> list[list[object]]:
    """[first step, last step, words] of each, by when the steps of its attempt were done."""
    known: dict[int, read.Curve | None] = {}
    marked: list[list[object]] = []
    for one in slow:
        if one.attempt.pk not in known:
            known[one.attempt.pk] = _steps(one.attempt)
        curve = known[one.attempt.pk]
        if curve is not None and len(curve.step) > 1:
            moments = [one.at.timestamp(), one.until.timestamp()]
            first, last = np.interp(moments, curve.time, curve.step.astype(np.float64)).tolist()
            if last > first:
                marked.append([first, last, one.text])
    return marked


def _rows(life: Life, attempts: Sequence[Attempt]) -> list[_Row]:
    """What was slow on any of their nodes between the first start and the last end, oldest first; the newest of it."""
    began = min(one.started_at for one in attempts if one.started_at)
    ended = max(one.ended_at or life.now for one in attempts)
    nodes = {node for one in attempts for node in one.nodes[:NODES]}
    there = NodeEvent.objects.filter(kind="mount.slow", agent__node__in=nodes, at__lt=ended)
    rows = there.filter(Q(is_open=True) | Q(last_at__gt=began)).order_by("-at")
    return list(rows.values_list("agent__node", "data", "at", "last_at", "is_open")[:MOST])[::-1]


def _of_attempt(life: Life, attempt: Attempt, rows: Iterable[_Row]) -> Iterator[Slow]:
    began, ended, nodes = attempt.started_at, attempt.ended_at or life.now, set(attempt.nodes[:NODES])
    for node, data, at, last_at, is_open in rows:
        if began and node in nodes and at < ended and (is_open or last_at > began):
            mount = untrusted.line(data.get("mount"), 72) or "A shared mount"
            yield Slow(mount, max(at, began), min(life.now if is_open else last_at, ended), attempt)


def _joined(rows: Iterable[Slow]) -> list[Slow]:
    found: list[Slow] = []
    last: dict[str, Slow] = {}
    for one in rows:
        before = last.get(one.mount)
        if before is not None and one.at <= before.until:
            before.until = max(before.until, one.until)
            continue
        last[one.mount] = one
        found.append(one)
    return found


def _steps(attempt: Attempt) -> read.Curve | None:
    """Its throughput, or else its loss: whichever it told."""
    owner = owner_of(attempt.pk)
    names = store.names([owner])
    name = next((one for one in (*charts.SPEEDS, "loss") if one in names), None)
    return read.curve([owner], name, points=POINTS) if name else None
