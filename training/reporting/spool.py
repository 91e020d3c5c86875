"""Read spool files: the only parser, for the shipper and for the portal. The standard library only.

A file is whatever a job left there, so nothing in it is trusted. The rules (protocols.md §3):
- A stream is a header line, then one line per batch; the n-th line after the header *is* seq n, whatever it claims. A
  line that is not a well-formed batch with that seq is passed on as an empty batch with one `report.damaged` event, so
  a cursor always gets past it.
- Only a line that ends with a newline counts. A torn last line is ignored: more may come, or its writer is dead.
- Segments `<file>`, `<file>.1`, `<file>.2` … follow each other once the next exists. An end line closes the stream.
- Lines and segments are bounded; files are opened without following links and must be regular.
"""

from __future__ import annotations

import math
import os
import re
import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice

from training.reporting.lines import ReportBatch, StreamHeader, parse, parse_header

NAME = re.compile(r"(?P<incarnation>\d{1,9})\.(?P<rank>-?\d{1,9})\.(?P<stream>[0-9a-f]{16})\.jsonl")
LINE_BYTES = 1024 * 1024
SEGMENT_BYTES = (
    16 * 1024 * 1024 + 2 * LINE_BYTES
)  # writers start a new segment at 16 MiB; anything far longer is not ours
SEGMENTS = 10_000
READ_BYTES = 1024 * 1024  # of lines read at once: each is soon parsed, and may contain thousands of points
ENTRIES = 100_000  # maximum number of folder entries that are examined
TOO_LONG_AT_ONCE = 2  # number of lines beyond LINE_BYTES


@dataclass(frozen=True)
class SpoolPosition:
    """Where the line of `seq` begins: an offset in bytes into a segment."""

    seq: int
    segment: int
    offset: int


class Spool:
    """One stream on disk, read from a cursor on while it may still grow.

    `directory` is an open descriptor of the spool folder, so that the caller decides how to get there safely.
    """

    def __init__(self, directory: int, name: str) -> None:
        match = NAME.fullmatch(name)
        if match is None:
            raise ValueError(f"{name!r} is not the name of a spool file")
        self.name, self.stream = name, match["stream"]
        self._file_numbers = (int(match["incarnation"]), int(match["rank"]))
        self._directory = directory
        self._start: SpoolPosition | None = None  # of seq 0, known once the header was read
        self._position: SpoolPosition | None = None
        self.header: StreamHeader | None = None
        self.has_ended = False  # an end line was read, or what follows can never be read

    @property
    def next_seq(self) -> int:
        """The seq of the next line to be read."""
        return self._position.seq if self._position else 0

    def size(self, *, of_another_node: bool = False) -> int:
        """Return the size on disk of all segments, which shows whether it grew. 0 if there is no such file.

        `of_another_node`: over NFS stat may return a value half a minute old, but opening a file returns the current
        one.
        """
        total = 0
        for segment in range(SEGMENTS):
            try:
                size = self._opened_size(segment) if of_another_node else self._stat_size(segment)
            except OSError:
                break
            total += size
        return total

    @property
    def position(self) -> SpoolPosition | None:
        """The position of the next line, from which a later reader can continue; None if there will be none."""
        return None if self._start is None or self.has_ended else self._position

    def seek(self, seq: int, *, hint: SpoolPosition | None = None, until: float = math.inf) -> None:
        """Continue at this seq; lines before it are counted, not parsed. Beyond the last line: stay at the end.

        `hint` is a position from an earlier reader from which to count; counting stops at `until` (monotonic seconds).
        """
        if self._position is None or self._start is None:
            return
        if seq < self.next_seq:
            self._position, self.has_ended = self._start, False
        if hint is not None and self.next_seq < hint.seq <= seq:
            self._position = hint
        while self.next_seq < seq and not self.has_ended and time.monotonic() < until:
            # Line by line only where a line is longer than one read, or a segment ends.
            if not self._skip_lines(seq - self.next_seq) and not sum(1 for _ in self._lines(1)):
                return

    def _skip_lines(self, limit: int) -> int:
        """Skip complete lines within one read, at most `limit`; return how many."""
        position = self._position or SpoolPosition(0, 0, 0)
        chunk = self._pread(position, LINE_BYTES + 1)
        count, end = chunk.count(b"\n"), chunk.rfind(b"\n")
        if count > limit:
            count, end = limit, -1
            for _ in range(limit):
                end = chunk.find(b"\n", end + 1)
        if count:
            self._position = SpoolPosition(position.seq + count, position.segment, position.offset + end + 1)
        return count

    def read(self, limit: int = 256) -> list[ReportBatch]:
        """Return the next complete batches, at most `limit`, none after READ_BYTES.

        [] at the end of what is on disk.
        """
        if self._position is None and not self._read_header():
            return []
        batches, size = [], 0
        for seq, line in self._lines(limit):
            batch = parse(line, seq)
            size += len(line or b"")
            if batch is None:
                self.has_ended = True
                self._position = replace(
                    self._position or SpoolPosition(0, 0, 0), seq=seq
                )  # the end line is not a batch
                break
            batches.append(batch)
            if size >= READ_BYTES:
                break
        return batches

    def _read_header(self) -> bool:
        """Read the header, which identifies the writer.

        A stream with an invalid or contradicting header is not read.
        """
        self._position = SpoolPosition(-1, 0, 0)
        for _, line in self._lines(1):
            self.header = parse_header(line, self.stream, self._file_numbers)
            self._start = self._position
            if self.header is None:
                self.has_ended = True
            return self.header is not None
        self._position = None
        return False

    def _lines(self, limit: int) -> Iterator[tuple[int, bytes | None]]:
        """Yield complete lines from the cursor on, moving it; None stands for one too long, or torn in a final segment.

        Only a few lines that are too long at once, as each may require reading a whole segment.
        """
        too_long = 0
        while limit > 0 and not self.has_ended and self._position is not None:
            chunk, final = self._chunk(self._position)
            start = 0
            while limit > 0 and (end := chunk.find(b"\n", start)) >= 0:
                self._position = SpoolPosition(
                    self._position.seq + 1, self._position.segment, self._position.offset + end + 1 - start
                )
                limit -= 1
                yield self._position.seq - 1, chunk[start:end] if end - start <= LINE_BYTES else None
                start = end + 1
            if limit == 0 or start > 0:
                continue  # there may be more after this read
            if not chunk and final:
                if self._position.offset == 0:
                    self.has_ended = True  # our segments are never empty; there could be any number of empty ones
                    return
                self._position = SpoolPosition(self._position.seq, self._position.segment + 1, 0)
            elif len(chunk) > LINE_BYTES or (chunk and final):
                position = self._skip_long_line(self._position)
                if position is None:
                    return
                self._position = position
                limit -= 1
                too_long += 1
                yield position.seq - 1, None
                if too_long == TOO_LONG_AT_ONCE:
                    return
            else:
                return

    def _chunk(self, position: SpoolPosition) -> tuple[bytes, bool]:
        """Return what follows in this segment, and whether the segment is final because there is a next one."""
        # Checked before reading: a writer never changes a segment again once it has created the next.
        final = self._exists(position.segment + 1)
        return self._pread(position, LINE_BYTES + 1), final

    def _skip_long_line(self, position: SpoolPosition) -> SpoolPosition | None:
        """Skip a line without an end within bounds: to the next newline, or to the next segment if there is one."""
        offset = position.offset
        while offset < SEGMENT_BYTES:
            chunk = self._pread(SpoolPosition(0, position.segment, offset), LINE_BYTES)
            if not chunk:
                break
            if (end := chunk.find(b"\n")) >= 0:
                return SpoolPosition(position.seq + 1, position.segment, offset + end + 1)
            offset += len(chunk)
        if self._exists(position.segment + 1):
            return SpoolPosition(position.seq + 1, position.segment + 1, 0)
        if offset >= SEGMENT_BYTES:
            self.has_ended = True  # our segments never get this long
        return None

    def _stat_size(self, segment: int) -> int:
        return os.stat(self._segment(segment), dir_fd=self._directory, follow_symlinks=False).st_size

    def _opened_size(self, segment: int) -> int:
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        file = os.open(self._segment(segment), flags, dir_fd=self._directory)
        try:
            return os.fstat(file).st_size
        finally:
            os.close(file)

    def _segment(self, number: int) -> str:
        return f"{self.name}.{number}" if number else self.name

    def _exists(self, segment: int) -> bool:
        if segment >= SEGMENTS:
            return False
        try:
            os.stat(self._segment(segment), dir_fd=self._directory, follow_symlinks=False)
        except OSError:
            return False
        return True

    def _pread(self, position: SpoolPosition, size: int) -> bytes:
        if position.offset >= SEGMENT_BYTES:
            return b""
        try:
            file = os.open(
                self._segment(position.segment),
                os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC,
                dir_fd=self._directory,
            )
        except OSError:
            return b""
        try:
            if not stat.S_ISREG(os.fstat(file).st_mode):
                return b""
            return os.pread(file, size, position.offset)
        except OSError:
            return b""
        finally:
            os.close(file)


def spool_names(directory: int) -> list[str]:
    """Return the first segments of the streams in an open spool folder, by incarnation, rank and name."""
    streams = []
    with os.scandir(directory) as entries:
        for entry in islice(entries, ENTRIES):
            if (match := NAME.fullmatch(entry.name)) and entry.is_file(follow_symlinks=False):
                streams.append((int(match["incarnation"]), int(match["rank"]), entry.name))
    return [name for _, _, name in sorted(streams)]


def open_folder(path: str | os.PathLike[str]) -> int:
    """Return a descriptor of a folder itself, never of what a link points to."""
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)


def read_spool(path: str | os.PathLike[str], from_seq: int = 0) -> tuple[StreamHeader | None, list[ReportBatch], bool]:
    """Read a whole stream from a seq on: header, batches, and whether it has ended. For tests and small files."""
    folder, name = os.path.split(os.fspath(path))
    directory = open_folder(folder or ".")
    try:
        spool = Spool(directory, name)
        batches = spool.read()
        if from_seq:
            spool.seek(from_seq)
            batches = spool.read()
        while more := spool.read():
            batches += more
        return spool.header, batches, spool.has_ended
    finally:
        os.close(directory)
