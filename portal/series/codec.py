"""Encode and decode chunks. Loose: many ranks, quick to write. Merged: one rank, byte-shuffled and deflated.

Everything is little-endian. The first byte gives the kind and version:

- loose (1): u32 runs; per run i32 rank, u32 n, f64 time; then all steps i64, then all values f64.
- merged (2): u32 n, i64 first step, i64 stride, u32 × 3 lengths; then steps (deltas, only where the stride is 0),
  times (lengths of stretches of equal time u32, then their times f64), values f64: each byte-shuffled and deflated.
"""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

LOOSE, MERGED = 1, 2
POINTS = 1024  # of a full merged chunk
# Fast deflate: half the work of the default level for a few per cent more space.
LEVEL = 3

_LOOSE = struct.Struct("<BI")
_MERGED = struct.Struct("<BIqqIII")
_RUN = np.dtype([("rank", "<i4"), ("n", "<u4"), ("time", "<f8")])


@dataclass(frozen=True)
class Points:
    """Columns of equal length: of one rank in one incarnation, in order of arrival or of step."""

    step: Integers
    time: Floats
    value: Floats

    def __len__(self) -> int:
        return len(self.step)

    def take(self, which: Any) -> Points:
        """Return the points that an index, slice or mask selects."""
        return Points(self.step[which], self.time[which], self.value[which])


EMPTY = Points(np.empty(0, np.int64), np.empty(0), np.empty(0))


@dataclass(frozen=True)
class Summary:
    """Summary of a chunk, stored in its row; min, max and sum are over finite values."""

    n: int
    first_step: int
    last_step: int
    stride: int
    min: float | None
    max: float | None
    sum: float
    odd: int


def summarise(step: Integers, value: Floats) -> Summary:
    """Summarise at least one point; steps in any order."""
    finite = value[np.isfinite(value)]
    low, high, total = None, None, 0.0
    if len(finite):
        low, high = float(finite.min()), float(finite.max())
        with np.errstate(over="ignore", invalid="ignore"):
            total = float(finite.sum())
        if not math.isfinite(total):
            total = float(bounded(total))
    return Summary(
        n=len(step),
        first_step=int(step.min()),
        last_step=int(step.max()),
        stride=_stride(step),
        min=low,
        max=high,
        sum=total,
        odd=len(value) - len(finite),
    )


def bounded(total: Any) -> Any:
    """Clip a sum that overflowed float64, so that a mean stays within bounds."""
    return np.nan_to_num(total, nan=0.0, posinf=1.7e308, neginf=-1.7e308)


def _stride(step: Integers) -> int:
    """Return the constant distance between rising steps; 1 for a single point, 0 if the distance varies."""
    if len(step) < 2:
        return 1
    distance = int(step[1] - step[0])
    return distance if distance > 0 and bool(np.all(np.diff(step) == distance)) else 0


def encode_loose(runs: list[tuple[int, float, int]], step: Integers, value: Floats) -> bytes:
    """Encode a loose chunk. `runs` split the columns: (rank, Unix time, number of points) each."""
    head = np.array([(rank, n, time) for rank, time, n in runs], _RUN)
    return b"".join(
        (_LOOSE.pack(LOOSE, len(runs)), head.tobytes(), step.astype("<i8").tobytes(), value.astype("<f8").tobytes())
    )


def decode_loose(data: bytes) -> list[tuple[int, Points]]:
    """Return (rank, points) in order of arrival; a rank may occur more than once."""
    head, step, value = _open_loose(data)
    ends = np.cumsum(head["n"], dtype=np.int64)
    return [
        (
            int(run["rank"]),
            Points(step[end - run["n"] : end], np.full(run["n"], run["time"]), value[end - run["n"] : end]),
        )
        for run, end in zip(head, ends, strict=True)
    ]


def decode_rank(data: bytes, rank: int) -> Points:
    """Return one rank's points of a loose chunk, in order of arrival."""
    head, step, value = _open_loose(data)
    counts = head["n"].astype(np.int64)
    of_rank = head["rank"] == rank
    mask = np.repeat(of_rank, counts)
    return Points(step[mask], np.repeat(head["time"][of_rank], counts[of_rank]), value[mask])


def _open_loose(data: bytes) -> tuple[NDArray[np.void], Integers, Floats]:
    kind, runs = _LOOSE.unpack_from(data)
    if kind != LOOSE:
        raise ValueError(f"a chunk of kind {kind} where a loose one was expected")
    head = np.frombuffer(data, _RUN, runs, _LOOSE.size)
    at, n = _LOOSE.size + head.nbytes, int(head["n"].sum())
    return head, np.frombuffer(data, "<i8", n, at), np.frombuffer(data, "<f8", n, at + 8 * n)


def encode_merged(points: Points) -> bytes:
    """Encode one rank's points with rising steps."""
    stride = _stride(points.step)
    steps = b"" if stride else _deflate(np.diff(points.step, prepend=points.step[0]).astype("<i8"))
    starts = np.flatnonzero(np.diff(points.time, prepend=np.nan))
    lengths = np.diff(starts, append=len(points)).astype("<u4")
    times = _deflate(lengths) + _deflate(points.time[starts].astype("<f8"))
    values = _deflate(points.value.astype("<f8"))
    head = _MERGED.pack(MERGED, len(points), int(points.step[0]), stride, len(steps), len(times), len(values))
    return b"".join((head, steps, times, values))


def decode_merged(data: bytes, *, times: bool = True) -> Points:
    """Return the points of a merged chunk; without times (then NaN) it is quicker."""
    n, first, stride, at_times, at_values = _open_merged(data)
    time = _times(data[at_times:at_values]) if times else np.full(n, np.nan)
    return Points(_steps(data, n, first, stride, at_times), time, _inflate(data[at_values:], "<f8"))


def last_of_each(chunks: Sequence[bytes], interval: int) -> tuple[Integers, Floats]:
    """Return the steps and values of the last point in each interval of steps, and of the last point of each chunk.

    Intervals begin at multiples of `interval`. Of these merged chunks only those points are put together of their
    bytes.
    """
    steps, values = [np.empty(0, np.int64)], [np.empty((8, 0), np.uint8)]
    for data in chunks:
        n, first, stride, at_times, at_values = _open_merged(data)
        if stride == 1:
            places = _lasts(n, (-1 - first) % interval, interval)
            steps.append(places + first)
        else:
            step = _steps(data, n, first, stride, at_times)
            places = np.flatnonzero(np.append(np.diff(step // interval) != 0, True))
            steps.append(step[places])
        planes = np.frombuffer(zlib.decompress(data[at_values:]), np.uint8).reshape(8, n)
        values.append(planes.take(places, axis=1))
    joined = np.concatenate(values, axis=1)
    return np.concatenate(steps), np.ascontiguousarray(joined.T).view("<f8").reshape(-1)


@lru_cache(maxsize=1_000)
def _lasts(number: int, first: int, interval: int) -> Integers:
    """Return the places first, first + interval, … and the last of so many points."""
    return np.append(np.arange(first, number - 1, interval, dtype=np.int64), number - 1)


def concatenated(series: Iterable[tuple[int, Sequence[bytes]]]) -> Iterator[tuple[int, Integers, Floats]]:
    """Yield each series' number with the steps and values of all its merged chunks, concatenated.

    The yielded arrays are overwritten by the next: new memory for each would cost as much as decoding them.
    """
    step, value = np.empty(0, np.int64), np.empty(0)
    for number, chunks in series:
        heads = [_open_merged(data) for data in chunks]
        total = sum(head[0] for head in heads)
        if total > len(step):
            step, value = np.empty(total, np.int64), np.empty(total)
        end = 0
        for data, (n, first, stride, at_times, at_values) in zip(chunks, heads, strict=True):
            begin, end = end, end + n
            step[begin:end] = _steps(data, n, first, stride, at_times)
            value[begin:end].view(np.uint8).reshape(n, -1)[:] = _planes(zlib.decompress(data[at_values:]), 8)
        yield number, step[:total], value[:total]


def _open_merged(data: bytes) -> tuple[int, int, int, int, int]:
    """Return how many points, their first step and stride, and where their times and values begin."""
    kind, n, first, stride, steps, times, _ = _MERGED.unpack_from(data)
    if kind != MERGED:
        raise ValueError(f"a chunk of kind {kind} where a merged one was expected")
    return n, first, stride, _MERGED.size + steps, _MERGED.size + steps + times


def _steps(data: bytes, n: int, first: int, stride: int, at_times: int) -> Integers:
    if stride:
        return np.arange(first, first + n * stride, stride, dtype=np.int64)
    return first + np.cumsum(_inflate(data[_MERGED.size : at_times], "<i8"))


def _times(data: bytes) -> Floats:
    inflate = zlib.decompressobj()
    lengths = _unshuffle(inflate.decompress(data), "<u4")
    return np.repeat(_inflate(inflate.unused_data, "<f8"), lengths)


def _deflate(column: NDArray[Any]) -> bytes:
    """Group bytes of equal significance, then deflate: the high ones hardly differ, and compress to almost nothing."""
    shuffled = column.view(np.uint8).reshape(len(column), column.itemsize).T.tobytes()
    return zlib.compress(shuffled, LEVEL)


def _inflate(data: bytes, dtype: str) -> NDArray[Any]:
    return _unshuffle(zlib.decompress(data), dtype)


def _unshuffle(data: bytes, dtype: str) -> NDArray[Any]:
    return np.ascontiguousarray(_planes(data, np.dtype(dtype).itemsize)).view(dtype).reshape(-1)


def _planes(data: bytes, size: int) -> NDArray[np.uint8]:
    """Return the bytes of each value, one value per row."""
    return np.frombuffer(data, np.uint8).reshape(size, -1).T
