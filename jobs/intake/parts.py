"""Cut a post into parts that are stored in one transaction each, so that none blocks other writers for long.

A post may hold 2,000 events in 16 MiB; other writers wait for the transaction that stores it. A part has whole
batches, in order: each stream's cursor advances with them, so parts are independent of each other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

from jobs.intake.wire import BatchIndex, ReportedEvent, ReportPost, SeriesColumns
from jobs.intake.wire import StreamBatches as Stream
from training.reporting.lines import BATCH_BYTES

EVENTS = 200  # of a part: 2 full batches, at most 80 ms of processor time on SQLite
BYTES = BATCH_BYTES  # of a part's events: a batch is not cut
STREAMS = 500  # of a part: each is a row that moves, or begins
RUNS = 1_000  # of a part, where each may be a row of points: streams of many incarnations


@dataclass(frozen=True)
class _PartSize:
    """The load that a batch, or a part, adds to a transaction."""

    events: int = 0
    bytes: int = 0
    runs: int = 0

    def __add__(self, other: _PartSize) -> _PartSize:
        return _PartSize(self.events + other.events, self.bytes + other.bytes, self.runs + other.runs)

    @property
    def fits(self) -> bool:
        """Return whether one transaction may store it."""
        return self.events <= EVENTS and self.bytes <= BYTES and self.runs <= RUNS


_NOTHING = _PartSize()


@dataclass
class _PostPart:
    """Batches of a post: for each stream those from `first` up to `stop`, exclusive."""

    first: dict[int, int] = field(default_factory=dict)
    stop: dict[int, int] = field(default_factory=dict)
    size: _PartSize = _NOTHING

    def add(self, stream: int, batch: int, size: _PartSize) -> None:
        self.first.setdefault(stream, batch)
        self.stop[stream] = batch + 1
        self.size += size

    def has_room(self, stream: int, size: _PartSize) -> bool:
        has_stream = stream in self.stop or len(self.stop) < STREAMS
        return not self.stop or (has_stream and (self.size + size).fits)


def cut(post: ReportPost) -> list[ReportPost]:
    """Return the post as one part or several, in the order in which they have to be stored."""
    sizes = _sizes(post)
    if len(post.streams) <= STREAMS and sum(sizes.values(), _NOTHING).fits:
        return [post]
    parts = _parts(post, sizes)
    if len(parts) == 1:
        return [post]
    part_of = {
        (stream, batch): place
        for place, part in enumerate(parts)
        for stream in part.stop
        for batch in range(part.first[stream], part.stop[stream])
    }
    return [_Cutter(post, part_of, place, part).post() for place, part in enumerate(parts)]


def _parts(post: ReportPost, sizes: Mapping[BatchIndex, _PartSize]) -> list[_PostPart]:
    parts = [_PostPart()]
    for stream, sent in enumerate(post.streams):
        for batch in range(len(sent.times)):
            size = sizes.get((stream, batch), _NOTHING)
            if not parts[-1].has_room(stream, size):
                parts.append(_PostPart())
            parts[-1].add(stream, batch, size)
        if not sent.times:
            if not parts[-1].has_room(stream, _NOTHING):
                parts.append(_PostPart())
            parts[-1].first[stream] = parts[-1].stop[stream] = 0
    return parts


def _sizes(post: ReportPost) -> dict[BatchIndex, _PartSize]:
    """Return what each batch adds; batches that add nothing are left out."""
    events = Counter(event.batch for event in post.events)
    size: Counter[BatchIndex] = Counter()
    for event in post.events:
        size[event.batch] += event.bytes
    runs = _runs(post)
    return {batch: _PartSize(events[batch], size[batch], runs[batch]) for batch in events.keys() | runs.keys()}


def _runs(post: ReportPost) -> Counter[BatchIndex]:
    """Return each batch's runs of points, where there may be so many rows of them that they count.

    The points of a series are one row for each incarnation, and for its launchers: seldom more than there are series.
    """
    kinds = {(stream.incarnation, stream.rank < 0) for stream in post.streams}
    if len(post.series) * len(kinds) <= RUNS:
        return Counter()
    return Counter((stream, batch) for columns in post.series.values() for stream, batch, _ in columns.runs)


@dataclass
class _Cutter:
    """Build the post of one part: its streams are renumbered, and their batches count from the part's first."""

    whole: ReportPost
    part_of: dict[BatchIndex, int]
    place: int
    part: _PostPart

    def post(self) -> ReportPost:
        place = {stream: number for number, stream in enumerate(self.part.stop)}
        return ReportPost(
            [self._stream(stream) for stream in place],
            {name: part for name, columns in self.whole.series.items() if (part := self._columns(columns, place))},
            list(self._events(place)),
            {self._renumbered(batch, place): why for batch, why in self.whole.bad.items() if self._has(batch)},
        )

    def _has(self, batch: BatchIndex) -> bool:
        return self.part_of.get(batch) == self.place

    def _renumbered(self, batch: BatchIndex, place: dict[int, int]) -> BatchIndex:
        return place[batch[0]], batch[1] - self.part.first[batch[0]]

    def _stream(self, stream: int) -> Stream:
        sent, first, stop = self.whole.streams[stream], self.part.first[stream], self.part.stop[stream]
        return Stream(
            id=sent.id, incarnation=sent.incarnation, rank=sent.rank, first=sent.first + first,
            times=sent.times[first:stop], node=sent.node, boot_id=sent.boot_id, restart_count=sent.restart_count,
            end=sent.end and stop == len(sent.times),
        )  # fmt: skip

    def _events(self, place: dict[int, int]) -> Iterator[ReportedEvent]:
        for event in self.whole.events:
            if self._has(event.batch):
                yield ReportedEvent(
                    self._renumbered(event.batch, place), event.kind, event.time, event.data, event.bytes
                )

    def _columns(self, columns: SeriesColumns, place: dict[int, int]) -> SeriesColumns | None:
        in_part = [self._has((stream, batch)) for stream, batch, _ in columns.runs]
        if not any(in_part):
            return None
        runs = [
            (*self._renumbered((stream, batch), place), count)
            for (stream, batch, count), is_in_part in zip(columns.runs, in_part, strict=True)
            if is_in_part
        ]
        mask = np.repeat(in_part, [count for _, _, count in columns.runs])
        return SeriesColumns(runs, columns.step[mask], columns.value[mask])
