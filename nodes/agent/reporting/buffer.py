"""Store unsent batches on this node's own disk: a stream that survives agent and machine restarts.

One writer at a time, by a lock. A batch's number is its position in the stream. Batches that cannot be written because
the disk is full or gone wait in memory; there too, samples are discarded before events.

    STATE/lock                an flock of the writing agent
    STATE/<16 hex digits>/    the stream: segments (nodes.agent.reporting.segments)
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

from nodes.agent.reporting.segments import BufferSegment, load_segments

LIMIT_BYTES = 256 * 1024 * 1024
LIMIT_IN_MEMORY = 8 * 1024 * 1024
BATCHES_PER_SEGMENT = 60
SYNC_SECONDS = 60.0
RETENTION_SECONDS = 86_400.0  # of accepted batches: a portal restored from a backup requests them again
HARD_LIMIT = 1.25  # times the limit, above which events are discarded too
_STREAM = re.compile(r"[0-9a-f]{16}")
_NO_ROOM = frozenset({errno.ENOSPC, errno.EROFS, errno.EIO, errno.EDQUOT, errno.EFBIG, errno.ENOMEM, errno.ESTALE})
_MARK = b',"kmsg":'


class StateUnusable(Exception):
    """The state folder cannot be used; the message says what to do."""


@dataclass
class Discarded:
    """The batches that are discarded next to make room, with their lines."""

    first: int
    count: int
    lines: list[bytes]
    is_in_memory: bool


def with_log_position(batch: bytes, boot_id: str, seq: int) -> bytes:
    """Append the kernel log position to a batch, so that both are stored or neither."""
    return batch[:-1] + _MARK + json.dumps([boot_id, seq], separators=(",", ":")).encode() + b"}"


def without_log_position(line: bytes) -> tuple[bytes, str, int]:
    """Split a line into batch, boot id, and the last kernel log record that the batch covers."""
    batch, found, mark = line.rpartition(_MARK)
    if found:
        with suppress(ValueError, TypeError):
            boot_id, seq = json.loads(mark[:-1])
            return batch + b"}", str(boot_id), int(seq)
    return line, "", -1


class Buffer:
    """A stream of batches, written by one thread and read by another."""

    def __init__(
        self,
        state: Path,
        *,
        limit_bytes: int = LIMIT_BYTES,
        limit_in_memory: int = LIMIT_IN_MEMORY,
        retention_seconds: float = RETENTION_SECONDS,
    ) -> None:
        """Open or create the stream in the state folder. Raises StateUnusable."""
        self._state, self._limit, self._limit_in_memory = state, limit_bytes, limit_in_memory
        self._retention_seconds = retention_seconds
        self._guard = threading.RLock()
        self._lock: int | None = None
        self._segments: list[BufferSegment] = []
        self._open: _OpenSegment | None = None
        self._memory: deque[tuple[int, bytes]] = deque()
        self._cache: tuple[int, list[bytes]] = (-1, [])
        self.problem = ""
        """Why batches stay in memory; "" while they are written to disk."""
        self.stream = os.urandom(8).hex()
        self.next = 0
        self.accepted = 0
        """The portal has all batches before this one, by its last response."""
        self.boot_id, self.kernel_seq = "", -1
        """From the last batch found on disk."""
        try:
            self._load()
        except OSError as error:
            self._note(error)
        self.began = self.next
        """The number of this agent's first batch."""

    def append(self, line: bytes, *, is_sync: bool) -> int:
        """Add a batch and return its number. `is_sync`: fsync it to disk before returning, if the disk works."""
        with self._guard:
            number, self.next = self.next, self.next + 1
            self._memory.append((number, line))
            self._write(is_sync=is_sync)
            return number

    def read(self, number: int, most: int) -> tuple[int, list[bytes]]:
        """Return the first available batch number from `number` on, and up to `most` lines from there."""
        with self._guard:
            for segment in self._segments:
                if segment.end > number:
                    lines = self._lines(segment)
                    first = max(segment.first, number)
                    if found := lines[first - segment.first :][:most]:
                        return first, found
            waiting = [(at, line) for at, line in self._memory if at >= number][:most]
            if not waiting:
                return self.next, []
            first = waiting[0][0]
            return first, [line for place, (at, line) in enumerate(waiting) if at == first + place]

    def note_accepted(self, number: int) -> None:
        """Note that the portal has all batches before this one."""
        with self._guard:
            self.accepted = number
            self._drop_accepted_in_memory()

    def renumber(self, number: int, since: int) -> None:
        """Shift batches after `since`: the portal has batches up to `number` that this disk has lost."""
        with self._guard:
            ahead = number - since
            if ahead <= 0:
                return
            self._close()
            for segment in reversed(self._segments):
                if segment.first >= since:
                    segment.renumber(segment.first + ahead)
            self._memory = deque((at + ahead if at >= since else at, line) for at, line in self._memory)
            self.next, self._cache = self.next + ahead, (-1, [])

    def surplus(self, now: float | None = None) -> Discarded | None:
        """Return the batches to discard next to stay within limits; None if it is within them.

        The caller sends their events again before it calls `drop`.
        """
        with self._guard:
            self._drop_accepted(time.time() if now is None else now)
            full = self._closed_segments()
            if self.size > self._limit and full:
                return Discarded(full[0].first, full[0].count, self._lines(full[0]), is_in_memory=False)
            if self._size_in_memory() > self._limit_in_memory:
                some = list(self._memory)[:BATCHES_PER_SEGMENT]
                return Discarded(some[0][0], len(some), [line for _, line in some], is_in_memory=True)
            return None

    @property
    def is_over_hard_limit(self) -> bool:
        """Return whether there is no room even for the events of discarded batches."""
        return self.size > HARD_LIMIT * self._limit or self._size_in_memory() > HARD_LIMIT * self._limit_in_memory

    def drop(self, discarded: Discarded) -> None:
        """Delete discarded batches, once their events are stored again."""
        with self._guard:
            if discarded.is_in_memory:
                self._memory = deque((at, line) for at, line in self._memory if at >= discarded.first + discarded.count)
                return
            for segment in [segment for segment in self._closed_segments() if segment.first == discarded.first]:
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

    # The methods below are called with the guard held.

    def _load(self) -> None:
        """Take the lock and load the existing stream."""
        self._state.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._lock = _lock_file(self._state / "lock")
        streams = [name for name in os.listdir(self._state) if _STREAM.fullmatch(name)]
        if streams:
            self.stream = max(streams, key=lambda name: (self._state / name).stat().st_mtime)
            self._segments = load_segments(self._folder)
        self.next = max((segment.end for segment in self._segments), default=0)
        self._load_log_position()
        for segment in self._segments:
            if not segment.is_closed:
                segment.compress()

    def _load_log_position(self) -> None:
        for segment in reversed(self._segments):
            for line in reversed(segment.lines()):
                _, self.boot_id, self.kernel_seq = without_log_position(line)
                if self.boot_id:
                    return

    @property
    def _folder(self) -> Path:
        return self._state / self.stream

    def _closed_segments(self) -> list[BufferSegment]:
        """Return the segments that are no longer written to."""
        return [segment for segment in self._segments if self._open is None or segment is not self._open.segment]

    def _write(self, *, is_sync: bool) -> None:
        """Write the batches in memory to disk, in order."""
        try:
            if self._lock is None:
                self._lock = _lock_file(self._state / "lock")
            self._drop_accepted_in_memory()
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

    def _segment_for(self, number: int) -> _OpenSegment:
        """Return the open segment if this batch comes next in it, else a new one."""
        if self._open is not None and (
            self._open.segment.end != number or self._open.segment.count >= BATCHES_PER_SEGMENT
        ):
            self._close()
        if self._open is None:
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._open = _OpenSegment(BufferSegment(self._folder, number, 0, False, 0))
            self._segments.append(self._open.segment)
        return self._open

    def _close(self) -> None:
        if self._open is None:
            return
        closing, self._open = self._open, None
        closing.close()
        if closing.segment.count:
            with suppress(OSError):  # the disk is full: it stays uncompressed, which is readable too
                closing.segment.compress()
        else:
            self._remove(closing.segment)

    def _abandon(self) -> None:
        """Give up a segment that cannot be written; its complete lines count."""
        if self._open is not None:
            closing, self._open = self._open, None
            with suppress(OSError):
                closing.close()
            if not closing.segment.count:
                with suppress(OSError):
                    self._remove(closing.segment)

    def _lines(self, segment: BufferSegment) -> list[bytes]:
        if self._open is not None and segment is self._open.segment:
            return self._open.lines
        if self._cache[0] != segment.first:
            try:
                self._cache = (segment.first, segment.lines()[: segment.count])
            except OSError:
                return []
        return self._cache[1]

    def _drop_accepted(self, now: float) -> None:
        """Delete accepted batches after RETENTION_SECONDS, or if there is no room."""
        for segment in self._closed_segments():
            is_old = now - segment.closed_at > self._retention_seconds
            if segment.end <= self.accepted and (is_old or self.size > self._limit):
                self._remove(segment)

    def _drop_accepted_in_memory(self) -> None:
        """Drop accepted batches from memory, but for the last one: it has the kernel log position."""
        while len(self._memory) > 1 and self._memory[0][0] < self.accepted:
            self._memory.popleft()

    def _remove(self, segment: BufferSegment) -> None:
        self._segments = [other for other in self._segments if other is not segment]
        segment.remove()

    def _size_in_memory(self) -> int:
        return sum(len(line) for _, line in self._memory)

    def _note(self, error: OSError) -> None:
        if error.errno not in _NO_ROOM and self._lock is None:
            raise StateUnusable(
                f"VIGIL_AGENT_STATE: {self._state} cannot be written ({error.strerror})."
                " Make it a folder that the agent's user owns."
            ) from error
        self.problem = error.strerror or type(error).__name__


@dataclass
class _OpenSegment:
    """The segment that is being written; its lines stay in memory for the sender."""

    segment: BufferSegment
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
        """Append a complete line or nothing: a partial write on a full disk is truncated again."""
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


def _lock_file(path: Path) -> int:
    """Take the lock for this process's lifetime. Raises StateUnusable if another agent has it."""
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
        raise StateUnusable(
            f"Another agent writes to {path.parent}. Stop it first, or set VIGIL_AGENT_STATE to another folder."
        ) from None
    return file


def batches_of(lines: Iterable[bytes]) -> list[dict[str, Any]]:
    """Parse the batches of lines, skipping those that a disk has damaged."""
    found = []
    for line in lines:
        with suppress(ValueError, RecursionError):
            batch = json.loads(without_log_position(line)[0])
            if isinstance(batch, dict):
                found.append(batch)
    return found
