"""Read spools as they grow, where nodes cannot reach the portal (VIGIL_REPORTS=tail): the worker's part of a shipper.

Once a second the holder of the lease checks the spools of every running attempt whose shippers do not post. New lines
are stored like a post (`spools.collect`), so that a second worker, or a shipper that posts all the same, neither loses
nor doubles anything.
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
LIST_S = 5.0  # after that, a folder is listed again whatever its modification time


@dataclass
class WatchedSpools:
    """The state of one attempt's spools. Streams that have ended are not checked again."""

    sizes: dict[str, tuple[int, int]] = field(default_factory=dict)  # by stream: its last segment, and the bytes in it
    ended: set[str] = field(default_factory=set)
    names: list[str] = field(default_factory=list)
    listed: tuple[int, float] = (-1, 0.0)  # the folder's own time, and when that was
    checked_at: float = 0.0

    def grown(self, folder: int, until: float) -> Iterator[str]:
        """Yield streams that have grown since they were last read to their end.

        The ones read longest ago come first.
        """
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
        listed_names = set(self.names)
        new_names = [name for name in spool.spool_names(folder) if name not in listed_names and name not in self.ended]
        self.names = [*new_names, *self.names]

    def _size(self, folder: int, name: str) -> tuple[int, int]:
        """Return a stream's newest segment and its size, by opening the file.

        Over NFS, stat may return a size of half a minute ago, but opening a file shows what its writer had written when
        it last closed or flushed it. One segment further per check at most: any number may exist, and the reader of the
        stream goes on to its end by itself.
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


_watched: dict[int, WatchedSpools] = {}


def tick() -> bool:
    """Read all tailed attempts once unless another worker does. Return whether there was anything to read."""
    attempts = list(_tailed())
    active = lease.take("tail") if attempts else None
    if active is None:
        _watched.clear()
        return False
    try:
        _read_in_turns(attempts)
    finally:
        active.release()
    return True


def _tailed() -> Iterator[Attempt]:
    rows = Attempt.objects.open().filter(tailed=True, ended_at=None).exclude(scheduler_id="")
    return rows.exclude(state=Attempt.State.PENDING).with_job().iterator()


def _read_in_turns(attempts: list[Attempt]) -> None:
    """Read attempts in turns, so that a large one delays no other; the one read longest ago comes first."""
    until = time.monotonic() + BUDGET_S
    for attempt_id in _watched.keys() - {attempt.pk for attempt in attempts}:
        del _watched[attempt_id]
    watched = {attempt.pk: _watched.setdefault(attempt.pk, WatchedSpools()) for attempt in attempts}
    waiting = deque(sorted(attempts, key=lambda attempt: watched[attempt.pk].checked_at))
    while waiting and (now := time.monotonic()) < until:
        attempt = waiting.popleft()
        share = min(until, now + SHARE_S)
        try:
            _read(attempt, watched[attempt.pk], share)
        except Exception:  # an unreachable or damaged run directory must not affect others
            logger.exception("attempt %s: its spools cannot be read in this tick", attempt.pk)
            continue
        if time.monotonic() >= share:
            waiting.append(attempt)  # there is more


def _read(attempt: Attempt, watched: WatchedSpools, until: float) -> None:
    watched.checked_at = time.monotonic()
    root = folders.root_of(attempt)
    if root is None or not folders.find_folder(attempt) or folders.is_unreachable(attempt):
        return
    if spools.collect(attempt, root, until=until, streams=lambda folder: watched.grown(folder, until)):
        watched.forget_ended(attempt)


def _bytes(folder: int, name: str, segment: int) -> int:
    """Return the length of one segment; −1 if there is none."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        file = os.open(f"{name}.{segment}" if segment else name, flags, dir_fd=folder)
    except OSError:
        return -1
    try:
        return os.fstat(file).st_size
    finally:
        os.close(file)
