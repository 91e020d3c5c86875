"""Frames become full chunks of each series: 1,024 s of a machine at once, aligned, so that thinning finds them whole.

A window is merged when the machine's samples have passed its end, or when the machine has long been silent. What comes
late, after its window was merged, becomes chunks of its own over the same seconds: who reads takes the later one.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from django.db import transaction
from django.db.models import F, Min, Q
from numpy.typing import NDArray

from nodes.models import Agent, Frame
from nodes.telemetry import frames, use
from nodes.telemetry.fields import GPU_FIELDS, LONGEST_S, WINDOW_S, gpu_owner, host_owner
from nodes.telemetry.frames import Sampled
from nodes.telemetry.wire import MISSING
from portal.models import Chunk
from portal.series import store
from portal.series.codec import Floats, Integers, Points
from portal.series.store import Owner

LATE_S = 60  # how far samples must have passed a window's end
SILENT_S = 900
ROWS = 32  # of a transaction: reports wait for it on SQLite
_REST_S = 0.002  # between transactions, so that waiting writers get their turn


def merge(budget_s: float = 10.0, *, now: float | None = None) -> int:
    """Merge the windows that are full, for about so long; answers how many frames went."""
    deadline = time.monotonic() + budget_s
    gone = 0
    for agent_id, window in _ripe(time.time() if now is None else now):
        gone += merge_window(agent_id, window)
        if time.monotonic() > deadline:
            break
    return gone


def _ripe(now: float) -> Iterator[tuple[int, int]]:
    """(machine, first second of the window): those whose samples have waited longest first.

    A window each in turn: a machine that tells of years gone by keeps no other waiting.
    """
    full = Q(sampled_at__gte=F("merged_to") + WINDOW_S + LATE_S) | Q(sampled_at__lt=now - SILENT_S)
    waiting = Agent.objects.filter(full, merged_to__gt=0, sampled_at__gte=F("merged_to")).order_by("merged_to")
    rows = waiting.values_list("pk", "merged_to", "sampled_at")
    turns = [_windows(agent_id, merged_to, sampled_at or 0, now) for agent_id, merged_to, sampled_at in rows]
    while turns:
        going_on = []
        for turn in turns:
            if (found := next(turn, None)) is not None:
                yield found
                going_on.append(turn)
        turns = going_on


def _windows(agent_id: int, merged_to: int, newest: int, now: float) -> Iterator[tuple[int, int]]:
    """A machine's, oldest first."""
    done = int(now if newest < now - SILENT_S else newest - LATE_S)
    while (window := _next_window(agent_id, merged_to)) is not None and window + WINDOW_S <= done:
        yield agent_id, window
        merged_to = window + WINDOW_S


def _next_window(agent_id: int, since: int) -> int | None:
    waiting = Frame.objects.filter(agent_id=agent_id, at__gt=since - LONGEST_S, until__gt=since)
    first: int | None = waiting.aggregate(first=Min("at"))["first"]
    return None if first is None else max(since, first // WINDOW_S * WINDOW_S)


def merge_window(agent_id: int, start: int) -> int:
    """All samples of this window; answers how many frames went. Of one that reaches beyond, the rest stays.

    Chunks are written first, a few a transaction, and frames go last: killed in between, it is done again, and what is
    there already is left alone.
    """
    end = start + WINDOW_S
    rows = Frame.objects.filter(agent_id=agent_id, at__gt=start - LONGEST_S, at__lt=end, until__gt=start).order_by("id")
    found = [(pk, frames.decode(bytes(data))) for pk, data in rows.values_list("pk", "data")]
    sampled = [frame for _, frame in found]
    columns = list(_gpu_columns(sampled, start))
    columns += [(host_owner(agent_id), name, points) for name, points in _host_columns(sampled, start)]
    chunks = _new_chunks(columns)
    for at in range(0, len(chunks), ROWS):
        with transaction.atomic():
            store.insert(chunks[at : at + ROWS])
        time.sleep(_REST_S)
    over = [pk for pk, frame in found if frame.until <= end]
    with transaction.atomic():
        gone, _ = Frame.objects.filter(pk__in=over).delete()
        if gone < len(over):  # somebody else has merged them meanwhile, and added them up
            transaction.set_rollback(True)
            return 0
        use.add_up(columns)
        for pk, frame in found:
            if frame.until > end:
                rest = _from(frame, end)
                data = frames.encode(rest.at, rest.period, rest.gpus, rest.host, rest.values)
                Frame.objects.filter(pk=pk).update(at=rest.at, data=data)
        # What comes late meanwhile sets this back, and is merged by the next.
        Agent.objects.filter(pk=agent_id, merged_to__gte=start, merged_to__lt=end).update(merged_to=end)
    return gone


def _gpu_columns(found: Sequence[Sampled], start: int) -> Iterator[tuple[Owner, str, Points]]:
    """Each GPU's series, seconds rising, each once: what came later wins."""
    for gpu in sorted({gpu for one in found for gpu in one.gpus}):
        mine = [(one, one.gpus.index(gpu)) for one in found if gpu in one.gpus]
        second = np.concatenate([one.seconds for one, _ in mine])
        values = np.concatenate([one.values[:, row, :] for one, row in mine], axis=1)
        order = _last_of_each(second, start)
        second, values = second[order], values[:, order]
        for name, column in zip(GPU_FIELDS, values, strict=True):
            told = column != MISSING
            if told.any():
                yield gpu_owner(gpu), name, _points(second[told], column[told].astype(np.float64))


def _host_columns(found: Sequence[Sampled], start: int) -> Iterator[tuple[str, Points]]:
    told: dict[str, list[tuple[int, float]]] = defaultdict(list)
    for one in found:
        for name, value in one.host.items():
            told[name].append((one.at, value))
    for name, values in told.items():
        second = np.array([at for at, _ in values], np.int64)
        order = _last_of_each(second, start)
        if len(order):
            yield name, _points(second[order], np.array([value for _, value in values])[order])


def _from(one: Sampled, second: int) -> Sampled:
    """What the frame has from this second on. What its host told belongs to its beginning."""
    cut = -(-(second - one.at) // one.period)
    return Sampled(one.at + cut * one.period, one.period, one.gpus, {}, one.values[:, :, cut:])


def _last_of_each(second: Integers, start: int) -> NDArray[np.int64]:
    """Where each second of the window was told last, seconds rising."""
    order = np.argsort(second, kind="stable")
    ordered = second[order]
    is_last = np.append(ordered[1:] != ordered[:-1], len(ordered) > 0)
    mine: NDArray[np.int64] = order[is_last & (ordered >= start) & (ordered < start + WINDOW_S)]
    return mine


def _points(second: Integers, value: Floats) -> Points:
    # One time for all: a step is its time already, and a time a point would take half as much room again.
    return Points(second, np.full(len(second), float(second[0])), value)


def _new_chunks(columns: Sequence[tuple[Owner, str, Points]]) -> list[tuple[Any, ...]]:
    """The rows of chunks that are not there yet."""
    by_owner: dict[Owner, list[tuple[str, Points]]] = defaultdict(list)
    for owner, name, points in columns:
        by_owner[owner].append((name, points))
    rows = []
    for owner, mine in by_owner.items():
        ids = store.declare(owner, [name for name, _ in mine])
        there = _there(list(ids.values()), mine)
        new = [(ids[name], points) for name, points in mine if _shape(ids[name], points) not in there]
        rows += [store.merged_row(series_id, 0, 0, points) for series_id, points in new]
    return rows


def _there(series_ids: Sequence[int], columns: Sequence[tuple[str, Points]]) -> set[tuple[int, int, int, int, float]]:
    """The shapes of merged chunks over the same seconds."""
    first = min(int(points.step[0]) for _, points in columns)
    last = max(int(points.step[-1]) for _, points in columns)
    over = Chunk.objects.filter(
        series__in=series_ids, kind=Chunk.Kind.MERGED, rank=0, last_step__gte=first, last_step__lte=last
    )
    return set(over.values_list("series_id", "first_step", "last_step", "n", "sum"))


def _shape(series_id: int, points: Points) -> tuple[int, int, int, int, float]:
    total = float(points.value[np.isfinite(points.value)].sum())
    return series_id, int(points.step[0]), int(points.step[-1]), len(points), total
