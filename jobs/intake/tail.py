"""Spools read as they grow, where nodes cannot reach the portal (VIGIL_REPORTS=tail): the worker's part of a shipper.

Once a second whoever holds the lease looks at the spools of every running attempt whose shippers were told not to
post. What has grown goes through the same door as a post (`spools.collect`), so another worker at it as well, or
a shipper that posts all the same, neither loses nor doubles anything.
"""

from __future__ import annotations

import logging
import os
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from jobs import lease
from jobs.disk import folders
from jobs.intake import spools
from jobs.models import Attempt, Stream
from training.reporting import spool

logger = logging.getLogger(__name__)

BUDGET_S = 2.0  # a tick
SHARE_S = 0.25  # of that, for one attempt in a row
LIST_S = 5.0  # a folder is listed again then, whatever its time says


@dataclass
class Watched:
    """What was seen of one attempt's spools. Streams that have ended are not looked at again."""

    sizes: dict[str, tuple[int, int]] = field(default_factory=dict)  # by stream: its last segment, and the bytes in it
    ended: set[str] = field(default_factory=set)
    names: list[str] = field(default_factory=list)
    listed: tuple[int, float] = (-1, 0.0)  # the folder's own time, and when that was
    looked_at: float = 0.0

    def grown(self, folder: int, until: float) -> Iterator[str]:
        """Streams that have grown since they were last read to their end; the ones read longest ago come first."""
        self._list(folder)
        for name in list(self.names):
            if time.monotonic() >= until:
                return
            size = self._size(folder, name)
            if size == self.sizes.get(name):
                continue
            yield name
            if time.monotonic() >= until:
                return  # it may not have been read to its end
            self.sizes[name] = size
            self.names.remove(name)
            self.names.append(name)

    def _list(self, folder: int) -> None:
        changed, now = os.fstat(folder).st_mtime_ns, time.monotonic()
        if changed == self.listed[0] and now - self.listed[1] < LIST_S:
            return
        self.listed = (changed, now)
        known = set(self.names)
        there = [name for name in spool.spool_names(folder) if name not in known and name not in self.ended]
        self.names = [*there, *self.names]

    def _size(self, folder: int, name: str) -> tuple[int, int]:
        """Tells its size by opening it: over NFS stat may tell what was so half a minute ago, but who opens a file is
        told what its writer had written when it last closed or flushed it. One segment further a look at most: any
        number may be there, and whoever reads the stream goes on to its end by itself.
        """
        segment, _ = self.sizes.get(name, (0, 0))
        size = _bytes(folder, name, segment)
        if size > spool.SEGMENT_BYTES // 2 and (more := _bytes(folder, name, segment + 1)) >= 0:
            return segment + 1, more
        return segment, size

    def forget_ended(self, attempt: Attempt) -> None:
        rows = Stream.objects.filter(attempt=attempt, ended=True).values_list("incarnation", "rank", "uid")
        self.ended = {f"{incarnation}.{rank}.{uid}.jsonl" for incarnation, rank, uid in rows}
        self.names = [name for name in self.names if name not in self.ended]


_watched: dict[int, Watched] = {}


def tick() -> bool:
    """One look at all of them, if nobody else is at it; whether there was anything to look at."""
    attempts = list(_tailed())
    held = lease.take("tail") if attempts else None
    if held is None:
        _watched.clear()
        return False
    try:
        _look(attempts)
    finally:
        held.release()
    return True


def _tailed() -> Iterator[Attempt]:
    rows = Attempt.objects.open().filter(tailed=True, ended_at=None).exclude(scheduler_id="")
    return rows.exclude(state=Attempt.State.PENDING).with_job().iterator()


def _look(attempts: list[Attempt]) -> None:
    """Reads them in turns, so that one with much to read keeps none waiting; who came last comes first next time."""
    until = time.monotonic() + BUDGET_S
    for gone in _watched.keys() - {attempt.pk for attempt in attempts}:
        del _watched[gone]
    seen = {attempt.pk: _watched.setdefault(attempt.pk, Watched()) for attempt in attempts}
    waiting = deque(sorted(attempts, key=lambda attempt: seen[attempt.pk].looked_at))
    while waiting and (now := time.monotonic()) < until:
        attempt = waiting.popleft()
        share = min(until, now + SHARE_S)
        try:
            _read(attempt, seen[attempt.pk], share)
        except Exception:  # a run directory that is away, or a damaged one, is its own affair
            logger.exception("attempt %s: its spools cannot be read in this tick", attempt.pk)
            continue
        if time.monotonic() >= share:
            waiting.append(attempt)  # there is more


def _read(attempt: Attempt, watched: Watched, until: float) -> None:
    watched.looked_at = time.monotonic()
    root = folders.root_of(attempt)
    if root is None or not folders.find_folder(attempt) or folders.is_away(attempt):
        return
    if spools.collect(attempt, root, until=until, streams=lambda folder: watched.grown(folder, until)):
        watched.forget_ended(attempt)


def _bytes(folder: int, name: str, segment: int) -> int:
    """The length of one segment; −1 where there is none."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        file = os.open(f"{name}.{segment}" if segment else name, flags, dir_fd=folder)
    except OSError:
        return -1
    try:
        return os.fstat(file).st_size
    finally:
        os.close(file)
