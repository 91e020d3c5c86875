"""Merge frames into full chunks per series: 1,024 s of a machine at once, aligned for downsampling.

A window is merged when the machine's samples have passed its end, or when the machine has long been silent. Samples
that arrive after their window was merged become further chunks over the same seconds: readers take the later one.
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
from nodes.telemetry.fields import GPU_FIELDS, MAX_SPAN_S, WINDOW_S, gpu_owner, host_owner
from nodes.telemetry.frames import DecodedFrame
from nodes.telemetry.wire import MISSING
from portal.models import Chunk
from portal.series import store
from portal.series.codec import Floats, Integers, Points
from portal.series.store import Owner

LATE_S = 60  # by which samples must have passed a window's end
SILENT_S = 900
ROWS = 32  # per transaction: on SQLite incoming reports wait for it
_REST_S = 0.002  # between transactions, so that waiting writers get their turn


def merge(budget_s: float = 10.0, *, now: float | None = None) -> int:
    """Merge full windows for about `budget_s`; return how many frames were merged."""
    deadline = time.monotonic() + budget_s
    merged = 0
    for agent_id, window in _due_windows(time.time() if now is None else now):
        merged += merge_window(agent_id, window)
        if time.monotonic() > deadline:
            break
    return merged


def _due_windows(now: float) -> Iterator[tuple[int, int]]:
    """Yield (machine, first second of the window), those that have waited longest first.

    One window per machine in turn, so that a machine with samples of past years does not delay the others.
    """
    full = Q(sampled_at__gte=F("merged_to") + WINDOW_S + LATE_S) | Q(sampled_at__lt=now - SILENT_S)
    waiting = Agent.objects.filter(full, merged_to__gt=0, sampled_at__gte=F("merged_to")).order_by("merged_to")
    rows = waiting.values_list("pk", "merged_to", "sampled_at")
    turns = [_windows(agent_id, merged_to, sampled_at or 0, now) for agent_id, merged_to, sampled_at in rows]
    while turns:
        remaining = []
        for turn in turns:
            if (found := next(turn, None)) is not None:
                yield found
                remaining.append(turn)
        turns = remaining


def _windows(agent_id: int, merged_to: int, newest: int, now: float) -> Iterator[tuple[int, int]]:
    """Yield a machine's windows, oldest first."""
    done = int(now if newest < now - SILENT_S else newest - LATE_S)
    while (window := _next_window(agent_id, merged_to)) is not None and window + WINDOW_S <= done:
        yield agent_id, window
        merged_to = window + WINDOW_S


def _next_window(agent_id: int, since: int) -> int | None:
    waiting = Frame.objects.filter(agent_id=agent_id, at__gt=since - MAX_SPAN_S, until__gt=since)
    first: int | None = waiting.aggregate(first=Min("at"))["first"]
    return None if first is None else max(since, first // WINDOW_S * WINDOW_S)


def merge_window(agent_id: int, start: int) -> int:
    """Merge all samples of this window; return how many frames were deleted. The rest of a longer frame stays.

    Chunks are written first, a few per transaction, and frames are deleted last: if this is killed in between, it is
    repeated, and existing chunks are left alone.
    """
    end = start + WINDOW_S
    rows = Frame.objects.filter(agent_id=agent_id, at__gt=start - MAX_SPAN_S, at__lt=end, until__gt=start).order_by(
        "id"
    )
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
        deleted, _ = Frame.objects.filter(pk__in=over).delete()
        if deleted < len(over):  # another process has merged and counted them meanwhile
            transaction.set_rollback(True)
            return 0
        use.add_up(columns)
        for pk, frame in found:
            if frame.until > end:
                rest = _rest_from(frame, end)
                data = frames.encode(rest.at, rest.period, rest.gpus, rest.host, rest.values)
                Frame.objects.filter(pk=pk).update(at=rest.at, data=data)
        # Late samples move this back, and the next run merges them.
        Agent.objects.filter(pk=agent_id, merged_to__gte=start, merged_to__lt=end).update(merged_to=end)
    return deleted


def _gpu_columns(found: Sequence[DecodedFrame], start: int) -> Iterator[tuple[Owner, str, Points]]:
    """Yield each GPU's series with ascending seconds, each once: the later sample wins."""
    for gpu in sorted({gpu for frame in found for gpu in frame.gpus}):
        frames_and_rows = [(frame, frame.gpus.index(gpu)) for frame in found if gpu in frame.gpus]
        second = np.concatenate([frame.seconds for frame, _ in frames_and_rows])
        values = np.concatenate([frame.values[:, row, :] for frame, row in frames_and_rows], axis=1)
        order = _last_of_each(second, start)
        second, values = second[order], values[:, order]
        for name, column in zip(GPU_FIELDS, values, strict=True):
            is_present = column != MISSING
            if is_present.any():
                yield gpu_owner(gpu), name, _points(second[is_present], column[is_present].astype(np.float64))


def _host_columns(found: Sequence[DecodedFrame], start: int) -> Iterator[tuple[str, Points]]:
    by_name: dict[str, list[tuple[int, float]]] = defaultdict(list)
    for frame in found:
        for name, value in frame.host.items():
            by_name[name].append((frame.at, value))
    for name, values in by_name.items():
        second = np.array([at for at, _ in values], np.int64)
        order = _last_of_each(second, start)
        if len(order):
            yield name, _points(second[order], np.array([value for _, value in values])[order])


def _rest_from(frame: DecodedFrame, second: int) -> DecodedFrame:
    """Return the part of a frame from this second on, without host values, which belong to its beginning."""
    cut = -(-(second - frame.at) // frame.period)
    return DecodedFrame(frame.at + cut * frame.period, frame.period, frame.gpus, {}, frame.values[:, :, cut:])


def _last_of_each(second: Integers, start: int) -> NDArray[np.int64]:
    """Return the indices of the last sample of each second of the window, with ascending seconds."""
    order = np.argsort(second, kind="stable")
    ordered = second[order]
    is_last = np.append(ordered[1:] != ordered[:-1], len(ordered) > 0)
    indices: NDArray[np.int64] = order[is_last & (ordered >= start) & (ordered < start + WINDOW_S)]
    return indices


def _points(second: Integers, value: Floats) -> Points:
    # One time for all points: the step is the time already, and a time per point would take 50 % more space.
    return Points(second, np.full(len(second), float(second[0])), value)


def _new_chunks(columns: Sequence[tuple[Owner, str, Points]]) -> list[tuple[Any, ...]]:
    """Return the rows of chunks that do not exist yet."""
    by_owner: dict[Owner, list[tuple[str, Points]]] = defaultdict(list)
    for owner, name, points in columns:
        by_owner[owner].append((name, points))
    rows = []
    for owner, series in by_owner.items():
        ids = store.declare(owner, [name for name, _ in series])
        existing = _existing(list(ids.values()), series)
        new = [(ids[name], points) for name, points in series if _shape(ids[name], points) not in existing]
        rows += [store.merged_row(series_id, 0, 0, points) for series_id, points in new]
    return rows


def _existing(
    series_ids: Sequence[int], columns: Sequence[tuple[str, Points]]
) -> set[tuple[int, int, int, int, float]]:
    """Return the shapes of existing merged chunks over the same seconds."""
    first = min(int(points.step[0]) for _, points in columns)
    last = max(int(points.step[-1]) for _, points in columns)
    over = Chunk.objects.filter(
        series__in=series_ids, kind=Chunk.Kind.MERGED, rank=0, last_step__gte=first, last_step__lte=last
    )
    return set(over.values_list("series_id", "first_step", "last_step", "n", "sum"))


def _shape(series_id: int, points: Points) -> tuple[int, int, int, int, float]:
    total = float(points.value[np.isfinite(points.value)].sum())
    return series_id, int(points.step[0]), int(points.step[-1]), len(points), total
