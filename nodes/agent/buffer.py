"""What is told and not yet taken, on this node's own disk: a stream of batches that survives agent and machine.

One writer at a time, by a lock. A batch's number is its place in the stream. What can't be written, because the disk is
full or gone, waits in memory; of that, too, samples go before events do.

    STATE/lock                an flock of whoever writes
    STATE/<16 hex digits>/    the stream: segments (nodes.agent.segments)
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import threading
import time
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nodes.agent.segments import Segment, found_in

LIMIT_BYTES = 256 * 1024 * 1024
LIMIT_IN_MEMORY = 8 * 1024 * 1024
BATCHES_A_SEGMENT = 60
SYNC_SECONDS = 60.0
KEPT_SECONDS = 86_400.0  # what was taken: a portal that was restored from its backup asks for it again
BEYOND = 1.25  # times the limit, beyond which events go, too
_STREAM = re.compile(r"[0-9a-f]{16}")
_NO_ROOM = frozenset({errno.ENOSPC, errno.EROFS, errno.EIO, errno.EDQUOT, errno.EFBIG, errno.ENOMEM, errno.ESTALE})
_MARK = b',"kmsg":'


class Refused(Exception):
    """There is no buffer to be had; the message says what to do."""


@dataclass
class GivenUp:
    """What goes to make room, with what its batches told."""

    first: int
    count: int
    lines: list[bytes]
    is_in_memory: bool


def marked(batch: bytes, boot_id: str, seq: int) -> bytes:
    """A batch's line: it carries how far the kernel log had been read, so both are written or none."""
    return batch[:-1] + _MARK + json.dumps([boot_id, seq], separators=(",", ":")).encode() + b"}"


def unmarked(line: bytes) -> tuple[bytes, str, int]:
    """The batch of a line, the boot that it is of, and the last record of the kernel log that it knows."""
    batch, found, mark = line.rpartition(_MARK)
    if found:
        with suppress(ValueError, TypeError):
            boot_id, seq = json.loads(mark[:-1])
            return batch + b"}", str(boot_id), int(seq)
    return line, "", -1


class Buffer:
    """Written by one thread, read by another."""

    def __init__(
        self,
        state: Path,
        *,
        limit_bytes: int = LIMIT_BYTES,
        limit_in_memory: int = LIMIT_IN_MEMORY,
        kept_seconds: float = KEPT_SECONDS,
    ) -> None:
        """Raises Refused."""
        self._state, self._limit, self._limit_in_memory = state, limit_bytes, limit_in_memory
        self._kept_seconds = kept_seconds
        self._guard = threading.RLock()
        self._lock: int | None = None
        self._segments: list[Segment] = []
        self._open: _Open | None = None
        self._memory: deque[tuple[int, bytes]] = deque()
        self._cache: tuple[int, list[bytes]] = (-1, [])
        self.problem = ""
        """Why batches wait in memory; "" while they are written."""
        self.stream = os.urandom(8).hex()
        self.next = 0
        self.taken = 0
        """What the portal has, as far as it has said."""
        self.boot_id, self.kernel_seq = "", -1
        """As the last batch that was found on disk has them."""
        try:
            self._find()
        except OSError as error:
            self._note(error)
        self.began = self.next
        """The number of this agent's first batch."""

    def append(self, line: bytes, *, is_sync: bool) -> int:
        """Add a batch; answers its number. `is_sync`: it is on disk for good when this returns, if anything may be."""
        with self._guard:
            number, self.next = self.next, self.next + 1
            self._memory.append((number, line))
            self._write(is_sync=is_sync)
            return number

    def read(self, number: int, most: int) -> tuple[int, list[bytes]]:
        """The first batch from `number` on that there is, and up to so many lines from it on."""
        with self._guard:
            for segment in self._segments:
                if segment.after > number:
                    lines = self._lines(segment)
                    first = max(segment.first, number)
                    if found := lines[first - segment.first :][:most]:
                        return first, found
            waiting = [(at, line) for at, line in self._memory if at >= number][:most]
            if not waiting:
                return self.next, []
            first = waiting[0][0]
            return first, [line for place, (at, line) in enumerate(waiting) if at == first + place]

    def note_taken(self, number: int) -> None:
        """The portal has all batches before this one."""
        with self._guard:
            self.taken = number
            self._forget_in_memory()

    def renumber(self, number: int, since: int) -> None:
        """The portal has batches up to `number` that this disk has lost: what came after `since` goes on from there."""
        with self._guard:
            ahead = number - since
            if ahead <= 0:
                return
            self._close()
            for segment in reversed(self._segments):
                if segment.first >= since:
                    segment.move(segment.first + ahead)
            self._memory = deque((at + ahead if at >= since else at, line) for at, line in self._memory)
            self.next, self._cache = self.next + ahead, (-1, [])

    def surplus(self, now: float | None = None) -> GivenUp | None:
        """What must go next to keep within limits, with its events yet to be told again; None: nothing."""
        with self._guard:
            self._forget_taken(time.time() if now is None else now)
            full = self._full()
            if self.size > self._limit and full:
                return GivenUp(full[0].first, full[0].count, self._lines(full[0]), is_in_memory=False)
            if self._size_in_memory() > self._limit_in_memory:
                some = list(self._memory)[:BATCHES_A_SEGMENT]
                return GivenUp(some[0][0], len(some), [line for _, line in some], is_in_memory=True)
            return None

    @property
    def is_far_beyond(self) -> bool:
        """Whether there is no room left for events of what is given up."""
        return self.size > BEYOND * self._limit or self._size_in_memory() > BEYOND * self._limit_in_memory

    def drop(self, given: GivenUp) -> None:
        """Let it go, once its events are told again."""
        with self._guard:
            if given.is_in_memory:
                self._memory = deque((at, line) for at, line in self._memory if at >= given.first + given.count)
                return
            for segment in [one for one in self._full() if one.first == given.first]:
                self._remove(segment)

    @property
    def size(self) -> int:
        return sum(segment.size for segment in self._segments)

    def close(self) -> None:
        with self._guard:
            with suppress(OSError):
                self._close()
            if self._lock is not None:
                os.close(self._lock)
                self._lock = None

    # What follows is called with the guard held.

    def _find(self) -> None:
        """Take the lock, and the stream that is there."""
        self._state.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._lock = _locked(self._state / "lock")
        streams = [name for name in os.listdir(self._state) if _STREAM.fullmatch(name)]
        if streams:
            self.stream = max(streams, key=lambda name: (self._state / name).stat().st_mtime)
            self._segments = found_in(self._folder)
        self.next = max((segment.after for segment in self._segments), default=0)
        self._remember()
        for segment in self._segments:
            if not segment.is_closed:
                segment.squeeze()

    def _remember(self) -> None:
        for segment in reversed(self._segments):
            for line in reversed(segment.lines()):
                _, self.boot_id, self.kernel_seq = unmarked(line)
                if self.boot_id:
                    return

    @property
    def _folder(self) -> Path:
        return self._state / self.stream

    def _full(self) -> list[Segment]:
        """Those that are not written any more."""
        return [one for one in self._segments if self._open is None or one is not self._open.segment]

    def _write(self, *, is_sync: bool) -> None:
        """Bring to disk what waits in memory, in order."""
        try:
            if self._lock is None:
                self._lock = _locked(self._state / "lock")
            self._forget_in_memory()
            while self._memory:
                number, line = self._memory[0]
                segment = self._segment_for(number)
                segment.write(line)
                self._memory.popleft()
            if self._open is not None:
                self._open.sync(now=time.monotonic(), is_wanted=is_sync)
            self.problem = ""
        except OSError as error:
            self._note(error)
            self._abandon()

    def _segment_for(self, number: int) -> _Open:
        """The open segment, if this batch comes next in it; else another."""
        if self._open is not None and (
            self._open.segment.after != number or self._open.segment.count >= BATCHES_A_SEGMENT
        ):
            self._close()
        if self._open is None:
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._open = _Open(Segment(self._folder, number, 0, False, 0))
            self._segments.append(self._open.segment)
        return self._open

    def _close(self) -> None:
        if self._open is None:
            return
        open_one, self._open = self._open, None
        open_one.close()
        if open_one.segment.count:
            with suppress(OSError):  # of a full disk: it stays as it is, and is read as it is
                open_one.segment.squeeze()
        else:
            self._remove(open_one.segment)

    def _abandon(self) -> None:
        """Leave a segment that can't be written: what is whole in it counts."""
        if self._open is not None:
            open_one, self._open = self._open, None
            with suppress(OSError):
                open_one.close()
            if not open_one.segment.count:
                with suppress(OSError):
                    self._remove(open_one.segment)

    def _lines(self, segment: Segment) -> list[bytes]:
        if self._open is not None and segment is self._open.segment:
            return self._open.lines
        if self._cache[0] != segment.first:
            try:
                self._cache = (segment.first, segment.lines()[: segment.count])
            except OSError:
                return []
        return self._cache[1]

    def _forget_taken(self, now: float) -> None:
        """What the portal has goes after a day, or where there is no room."""
        for segment in self._full():
            is_old = now - segment.closed_at > self._kept_seconds
            if segment.after <= self.taken and (is_old or self.size > self._limit):
                self._remove(segment)

    def _forget_in_memory(self) -> None:
        """What the portal has need not wait for room; the last of it does, as it knows the place in the kernel log."""
        while len(self._memory) > 1 and self._memory[0][0] < self.taken:
            self._memory.popleft()

    def _remove(self, segment: Segment) -> None:
        self._segments = [one for one in self._segments if one is not segment]
        segment.remove()

    def _size_in_memory(self) -> int:
        return sum(len(line) for _, line in self._memory)

    def _note(self, error: OSError) -> None:
        if error.errno not in _NO_ROOM and self._lock is None:
            raise Refused(
                f"VIGIL_AGENT_STATE: {self._state} can't be written ({error.strerror})."
                " Make it a folder of the agent's user."
            ) from error
        self.problem = error.strerror or type(error).__name__


@dataclass
class _Open:
    """The segment that is written; what it holds is kept in memory, too, for whoever posts it."""

    segment: Segment
    lines: list[bytes] = field(default_factory=list)
    _file: int = -1
    _synced_at: float = 0.0
    _is_dirty: bool = False
    _is_new: bool = True

    def __post_init__(self) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        self._file = os.open(self.segment.path, flags, 0o600)
        self._synced_at = time.monotonic()

    def write(self, line: bytes) -> None:
        """A line, whole or not at all: what a full disk takes of one is cut off again."""
        data, written = line + b"\n", 0
        try:
            while written < len(data):
                written += os.write(self._file, data[written:])
        except OSError:
            with suppress(OSError):
                os.ftruncate(self._file, self.segment.size)
            raise
        self.segment.size += len(data)
        self.segment.count += 1
        self.segment.closed_at = time.time()
        self.lines.append(line)
        self._is_dirty = True

    def sync(self, *, now: float, is_wanted: bool) -> None:
        if self._is_dirty and (is_wanted or now - self._synced_at >= SYNC_SECONDS):
            os.fdatasync(self._file)
            if self._is_new:
                _sync_folder(self.segment.folder)
            self._is_new = False
            self._synced_at, self._is_dirty = now, False

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def _sync_folder(folder: Path) -> None:
    file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def _locked(path: Path) -> int:
    """The lock, for life. Raises Refused where another agent has it."""
    try:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if error.errno != errno.EROFS:
            raise
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(file)
        raise Refused(
            f"Another agent writes to {path.parent}. End it first,"
            " or set VIGIL_AGENT_STATE to a folder of this one's own."
        ) from None
    return file


def batches_of(lines: Iterable[bytes]) -> list[dict[str, Any]]:
    """What lines say, but for those that a disk has damaged."""
    found = []
    for line in lines:
        with suppress(ValueError, RecursionError):
            batch = json.loads(unmarked(line)[0])
            if isinstance(batch, dict):
                found.append(batch)
    return found
