"""The kernel's log, as /dev/kmsg tells it: a record a read, each with a number that no later one has until a boot.

A plain file or a FIFO of such records will do instead, a line a record.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

MOST_BYTES = 16 * 1024  # a read with less room than the record takes is refused
AT_ONCE = 2_000  # records a look, so that a flood leaves time for the rest
_ESCAPE = re.compile(rb"\\x([0-9a-f]{2})")


@dataclass(frozen=True)
class Record:
    """What the kernel itself said."""

    seq: int
    at: float
    """Seconds since boot."""
    raw: bytes

    @property
    def text(self) -> str:
        plain = _ESCAPE.sub(lambda match: bytes([int(match[1], 16)]), self.raw)
        return plain.decode(errors="replace")


def parse(line: bytes) -> tuple[bool, Record] | None:
    """A record, and whether it is the kernel's own rather than a program's; None for what is none."""
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
    return priority >> 3 == 0, Record(seq, microseconds / 1e6, text.partition(b"\n")[0])


@dataclass
class KernelLog:
    """Read on from where it was left, never waiting."""

    path: Path
    told_seq: int = -1
    """Up to where an agent before has read it in this boot; -1: nobody has."""
    problem: str = "it has not been opened yet"
    """Why nothing can be read; "" while all is well."""
    last_seq: int = -1
    overruns: list[tuple[int, int]] = field(default_factory=list)
    """First and last number of records that were lost, for the caller to take."""
    _file: int | None = None
    _is_stream: bool = False
    _is_plain: bool = False
    _offset: int = 0
    _rest: bytes = b""
    _is_overrun: bool = False

    def fileno(self) -> int | None:
        """What becomes readable with the next record; None where only looking tells."""
        return None if self._is_plain else self._file

    def open(self) -> None:
        """From the oldest record that is there; `problem` says why not. What was read before is told by then."""
        self.close()
        self.told_seq, self.last_seq = max(self.told_seq, self.last_seq), -1
        try:
            mode = os.stat(self.path).st_mode
            self._is_plain, self._is_stream = stat.S_ISREG(mode), stat.S_ISFIFO(mode)
            # Of a FIFO that nobody else holds open for writing the end would be there at once.
            how = os.O_RDWR if self._is_stream else os.O_RDONLY
            self._file = os.open(self.path, how | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            self.problem = f"{self.path}: {error.strerror}"
        else:
            self.problem, self._offset, self._rest = "", 0, b""

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
        self._file = None

    def read(self) -> list[Record]:
        """The kernel's own records since the last look, at most some; `last_seq` is past all that were seen."""
        if self._file is None:
            return []
        found: list[Record] = []
        try:
            for line in self._lines() if self._is_plain or self._is_stream else self._records(self._file):
                if record := self._take(line):
                    found.append(record)
        except OSError as error:
            self.problem = f"{self.path}: {error.strerror}"
            self.close()
        return found

    def _take(self, line: bytes) -> Record | None:
        found = parse(line)
        if found is None:
            return None
        is_kernels, record = found
        self._note_overrun(record.seq)
        self.last_seq = max(self.last_seq, record.seq)
        return record if is_kernels else None

    def _note_overrun(self, seq: int) -> None:
        """Records are lost where the kernel says so, or what is oldest now is newer than what was read before."""
        before = self.last_seq if self.last_seq >= 0 else self.told_seq
        is_first = self.last_seq < 0 and not (self._is_plain or self._is_stream)
        if (self._is_overrun or is_first) and 0 <= before < seq - 1:
            self.overruns.append((before + 1, seq - 1))
        self._is_overrun = False

    def _records(self, file: int) -> Iterator[bytes]:
        for _ in range(AT_ONCE):
            try:
                record = os.read(file, MOST_BYTES)
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno != errno.EPIPE:  # the ring went round: the next read tells the oldest that is left
                    raise
                self._is_overrun = True
                continue
            if not record:
                return
            yield record

    def _lines(self) -> list[bytes]:
        """Whole lines of a file or FIFO; those that begin with a space say more of the record before."""
        self._rest += self._more()
        *lines, self._rest = self._rest.split(b"\n")
        if len(self._rest) > MOST_BYTES:
            self._rest = b""
        return [line for line in lines if line and not line.startswith(b" ")]

    def _more(self) -> bytes:
        if self._file is None:
            return b""
        if self._is_stream:
            with suppress(BlockingIOError):
                return os.read(self._file, 64 * MOST_BYTES)
            return b""
        self._follow()
        found = os.pread(self._file, 64 * MOST_BYTES, self._offset)
        self._offset += len(found)
        return found

    def _follow(self) -> None:
        """The file that has the name now, from its beginning where it was replaced or cut."""
        if self._file is None:
            return
        with suppress(FileNotFoundError):
            now, ours = os.stat(self.path), os.fstat(self._file)
            if (now.st_dev, now.st_ino) != (ours.st_dev, ours.st_ino):
                replaced = os.open(self.path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
                os.dup2(replaced, self._file, inheritable=False)
                os.close(replaced)
                self._offset, self._rest = 0, b""
            elif now.st_size < self._offset:
                self._offset, self._rest = 0, b""
