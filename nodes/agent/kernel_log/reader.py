"""Read the kernel log from /dev/kmsg: one record per read, with a sequence number that is unique until reboot.

A plain file or a FIFO of such records works too, one record per line. Of what programs write there, only the lines of
this process count (`write`).
"""

from __future__ import annotations

import errno
import os
import re
import stat
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

MAX_BYTES = 16 * 1024  # a read with a smaller buffer than the record fails
MAX_RECORDS = 2_000  # per call, so that a flood leaves time for the rest
USER_WARNING = 12  # facility 1 (the kernel lets programs write no other as 0), level 4
_ESCAPE = re.compile(rb"\\x([0-9a-f]{2})")


@dataclass(frozen=True)
class KernelRecord:
    """A record that the kernel itself wrote, or this process."""

    seq: int
    at: float
    """Seconds since boot."""
    raw: bytes

    @property
    def text(self) -> str:
        plain = _ESCAPE.sub(lambda match: bytes([int(match[1], 16)]), self.raw)
        return plain.decode(errors="replace")


def parse(line: bytes) -> tuple[bool, KernelRecord] | None:
    """Return (is from the kernel, record); None for a malformed line. Programs can write to the log too."""
    head, found, text = line.partition(b";")
    parts = head.split(b",")
    if not found or len(parts) < 3:
        return None
    try:
        priority, seq, microseconds = int(parts[0]), int(parts[1]), int(parts[2])
    except ValueError:
        return None
    if min(priority, seq, microseconds) < 0 or seq >= 2**63 or microseconds >= 2**63:
        return None
    return priority >> 3 == 0, KernelRecord(seq, microseconds / 1e6, text.partition(b"\n")[0])


@dataclass
class KernelLog:
    """Reads the kernel log without blocking, continuing where the last call stopped."""

    path: Path
    reported_seq: int = -1
    """The last record that a previous agent reported in this boot; -1: none."""
    problem: str = "not opened yet"
    """Why nothing can be read; "" if it works."""
    last_seq: int = -1
    overruns: list[tuple[int, int]] = field(default_factory=list)
    """First and last number of lost records; the caller clears the list."""
    _file: int | None = None
    _is_stream: bool = False
    _is_plain: bool = False
    _offset: int = 0
    _rest: bytes = b""
    _is_overrun: bool = False
    _written: set[bytes] = field(default_factory=set)

    def fileno(self) -> int | None:
        """Return a descriptor that becomes readable with the next record; None for a plain file."""
        return None if self._is_plain else self._file

    def open(self) -> None:
        """Open at the oldest record; `problem` says why not. Records up to `reported_seq` are not reported again."""
        self.close()
        self.reported_seq, self.last_seq = max(self.reported_seq, self.last_seq), -1
        try:
            mode = os.stat(self.path).st_mode
            self._is_plain, self._is_stream = stat.S_ISREG(mode), stat.S_ISFIFO(mode)
            # Opened for writing too: a FIFO without a writer would report its end at once.
            flags = os.O_RDWR if self._is_stream else os.O_RDONLY
            self._file = os.open(self.path, flags | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            self.problem = f"{self.path}: {error.strerror}"
        else:
            self.problem, self._offset, self._rest = "", 0, b""

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
        self._file = None

    def read(self) -> list[KernelRecord]:
        """Return the kernel's records since the last call, up to MAX_RECORDS; `last_seq` covers all that were read."""
        if self._file is None:
            return []
        found: list[KernelRecord] = []
        try:
            for line in self._lines() if self._is_plain or self._is_stream else self._records(self._file):
                if record := self._accept(line):
                    found.append(record)
        except OSError as error:
            self.problem = f"{self.path}: {error.strerror}"
            self.close()
        return found

    def write(self, text: str) -> None:
        """Write a line that `read` then returns once, though the kernel did not write it. Raises OSError."""
        raw = text.encode()
        if self._is_plain or self._is_stream:
            at = int(1e6 * time.clock_gettime(time.CLOCK_BOOTTIME))
            seq = max(self.last_seq, self.reported_seq) + 1
            line = b"%d,%d,%d,-;%b\n" % (USER_WARNING, seq, at, raw)
        else:
            line = b"<%d>%b\n" % (USER_WARNING, raw)  # without the newline the kernel keeps the record open
        file = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            os.write(file, line)
        finally:
            os.close(file)
        self._written.add(raw)

    def _accept(self, line: bytes) -> KernelRecord | None:
        found = parse(line)
        if found is None:
            return None
        is_from_kernel, record = found
        self._note_overrun(record.seq)
        self.last_seq = max(self.last_seq, record.seq)
        if not is_from_kernel and record.raw in self._written:
            self._written.discard(record.raw)
            return record
        return record if is_from_kernel else None

    def _note_overrun(self, seq: int) -> None:
        """Note lost records: the kernel reported an overrun, or the oldest record is newer than expected."""
        previous = self.last_seq if self.last_seq >= 0 else self.reported_seq
        is_first = self.last_seq < 0 and not (self._is_plain or self._is_stream)
        if (self._is_overrun or is_first) and 0 <= previous < seq - 1:
            self.overruns.append((previous + 1, seq - 1))
        self._is_overrun = False

    def _records(self, file: int) -> Iterator[bytes]:
        for _ in range(MAX_RECORDS):
            try:
                record = os.read(file, MAX_BYTES)
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno != errno.EPIPE:  # the ring buffer wrapped: the next read returns the oldest record left
                    raise
                self._is_overrun = True
                continue
            if not record:
                return
            yield record

    def _lines(self) -> list[bytes]:
        """Return complete lines of a file or FIFO; lines that begin with a space continue the previous record."""
        self._rest += self._read_more()
        *lines, self._rest = self._rest.split(b"\n")
        if len(self._rest) > MAX_BYTES:
            self._rest = b""
        return [line for line in lines if line and not line.startswith(b" ")]

    def _read_more(self) -> bytes:
        if self._file is None:
            return b""
        if self._is_stream:
            with suppress(BlockingIOError):
                return os.read(self._file, 64 * MAX_BYTES)
            return b""
        self._reopen_if_replaced()
        found = os.pread(self._file, 64 * MAX_BYTES, self._offset)
        self._offset += len(found)
        return found

    def _reopen_if_replaced(self) -> None:
        """Switch to the file that has the name now; start over if it was replaced or truncated."""
        if self._file is None:
            return
        with suppress(FileNotFoundError):
            current, opened = os.stat(self.path), os.fstat(self._file)
            if (current.st_dev, current.st_ino) != (opened.st_dev, opened.st_ino):
                replaced = os.open(self.path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
                os.dup2(replaced, self._file, inheritable=False)
                os.close(replaced)
                self._offset, self._rest = 0, b""
            elif current.st_size < self._offset:
                self._offset, self._rest = 0, b""
