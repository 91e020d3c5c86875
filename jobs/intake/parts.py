"""Cut a post into parts that are stored in one transaction each, so that none blocks other writers for long.

A post may hold 2,000 events in 16 MiB; other writers wait for the transaction that stores it. A part has whole
batches, in order: each stream's cursor advances with them, so parts are independent of each other.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from jobs.intake.wire import Batch, Columns, Happening, Post
from jobs.intake.wire import Part as Stream

EVENTS = 400  # of a part: 4 full batches, some 50 ms on SQLite
BYTES = 1024 * 1024  # of a part's events


@dataclass
class _Part:
    """Batches of a post: of each stream those from `first` up to `stop`, exclusive."""

    first: dict[int, int] = field(default_factory=dict)
    stop: dict[int, int] = field(default_factory=dict)
    events: int = 0
    bytes: int = 0

    def add(self, stream: int, batch: int, events: int, size: int) -> None:
        self.first.setdefault(stream, batch)
        self.stop[stream] = batch + 1
        self.events += events
        self.bytes += size

    def has_room(self, events: int, size: int) -> bool:
        return not self.stop or (self.events + events <= EVENTS and self.bytes + size <= BYTES)


def cut(post: Post) -> list[Post]:
    """Return the post as one part or several, in the order in which they have to be stored."""
    if len(post.events) <= EVENTS and sum(event.bytes for event in post.events) <= BYTES:
        return [post]
    parts = _parts(post)
    if len(parts) == 1:
        return [post]
    part_of = {
        (stream, batch): place
        for place, part in enumerate(parts)
        for stream in part.stop
        for batch in range(part.first[stream], part.stop[stream])
    }
    return [_Cutter(post, part_of, place, part).post() for place, part in enumerate(parts)]


def _parts(post: Post) -> list[_Part]:
    counts: dict[Batch, int] = defaultdict(int)
    sizes: dict[Batch, int] = defaultdict(int)
    for event in post.events:
        counts[event.batch] += 1
        sizes[event.batch] += event.bytes
    parts = [_Part()]
    for stream, sent in enumerate(post.streams):
        for batch in range(len(sent.times)):
            place = (stream, batch)
            if not parts[-1].has_room(counts[place], sizes[place]):
                parts.append(_Part())
            parts[-1].add(stream, batch, counts[place], sizes[place])
        if not sent.times:
            parts[-1].first[stream] = parts[-1].stop[stream] = 0
    return parts


@dataclass
class _Cutter:
    """Builds the post of one part: its streams are renumbered, and their batches count from the part's first."""

    whole: Post
    part_of: dict[Batch, int]
    place: int
    part: _Part

    def post(self) -> Post:
        place = {stream: number for number, stream in enumerate(self.part.stop)}
        return Post(
            [self._stream(stream) for stream in place],
            {name: kept for name, columns in self.whole.series.items() if (kept := self._columns(columns, place))},
            list(self._events(place)),
            {self._moved(batch, place): why for batch, why in self.whole.bad.items() if self._has(batch)},
        )

    def _has(self, batch: Batch) -> bool:
        return self.part_of.get(batch) == self.place

    def _moved(self, batch: Batch, place: dict[int, int]) -> Batch:
        return place[batch[0]], batch[1] - self.part.first[batch[0]]

    def _stream(self, stream: int) -> Stream:
        sent, first, stop = self.whole.streams[stream], self.part.first[stream], self.part.stop[stream]
        return Stream(
            id=sent.id, incarnation=sent.incarnation, rank=sent.rank, first=sent.first + first,
            times=sent.times[first:stop], node=sent.node, boot_id=sent.boot_id, restart_count=sent.restart_count,
            end=sent.end and stop == len(sent.times),
        )  # fmt: skip

    def _events(self, place: dict[int, int]) -> Iterator[Happening]:
        for event in self.whole.events:
            if self._has(event.batch):
                yield Happening(self._moved(event.batch, place), event.kind, event.time, event.data, event.bytes)

    def _columns(self, columns: Columns, place: dict[int, int]) -> Columns | None:
        mine = [self._has((stream, batch)) for stream, batch, _ in columns.runs]
        if not any(mine):
            return None
        runs = [
            (*self._moved((stream, batch), place), count)
            for (stream, batch, count), is_mine in zip(columns.runs, mine, strict=True)
            if is_mine
        ]
        mask = np.repeat(mine, [count for _, _, count in columns.runs])
        return Columns(runs, columns.step[mask], columns.value[mask])
