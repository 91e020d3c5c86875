"""Reading spool files: the one parser, for the shipper and for the portal. The standard library only.

A file is whatever a job left there, so nothing in it is trusted. The rules (protocols.md §3):

- A stream is a header line, then a line a batch; the n-th line after the header *is* seq n, whatever it claims. A line
  that is no well-formed batch with that seq is passed on as an empty batch with one `report.damaged` event, so a cursor
  always gets past it.
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

from training.reporting.lines import Batch, Header, parse, parse_header

NAME = re.compile(r"(?P<incarnation>\d{1,9})\.(?P<rank>-?\d{1,9})\.(?P<stream>[0-9a-f]{16})\.jsonl")
LINE_BYTES = 1024 * 1024
SEGMENT_BYTES = 16 * 1024 * 1024 + 2 * LINE_BYTES  # a writer turns the page at 16 MiB; anything far longer is not ours
SEGMENTS = 10_000
READ_BYTES = 1024 * 1024  # of lines read at once: each is soon parsed, and may hold thousands of points
ENTRIES = 100_000  # of a folder that are looked at
TOO_LONG_AT_ONCE = 2  # lines beyond LINE_BYTES


@dataclass(frozen=True)
class Place:
    """Where the line of `seq` begins: bytes into a segment."""

    seq: int
    segment: int
    offset: int


class Spool:
    """One stream on disk, read from a cursor on while it may still grow.

    `directory` is an open descriptor of the spool folder, so that the caller decides how it got there safely.
    """

    def __init__(self, directory: int, name: str) -> None:
        match = NAME.fullmatch(name)
        if match is None:
            raise ValueError(f"{name!r} is not the name of a spool file")
        self.name, self.stream = name, match["stream"]
        self._named = (int(match["incarnation"]), int(match["rank"]))
        self._directory = directory
        self._start: Place | None = None  # of seq 0, known once the header was read
        self._at: Place | None = None
        self.header: Header | None = None
        self.ended = False  # an end line was read, or what follows can never be read

    @property
    def next_seq(self) -> int:
        """The seq of the next line to be read."""
        return self._at.seq if self._at else 0

    def size(self, *, of_another_node: bool = False) -> int:
        """Bytes on disk, all segments: it grew if this did. 0 where there is no such file.

        `of_another_node`: over NFS stat may tell what was so half a minute ago; who opens a file is told what is true.
        """
        total = 0
        for segment in range(SEGMENTS):
            try:
                found = self._opened_size(segment) if of_another_node else self._stat_size(segment)
            except OSError:
                break
            total += found
        return total

    @property
    def place(self) -> Place | None:
        """Where the next line is, for a later reader to go on from; None where there will be none."""
        return None if self._start is None or self.ended else self._at

    def seek(self, seq: int, *, near: Place | None = None, until: float = math.inf) -> None:
        """Read from this seq on; lines before it are counted, not parsed. Beyond the last line: stay at the end.

        `near` is a place told by an earlier reader, from which to count; at `until` (monotonic seconds) counting stops.
        """
        if self._at is None or self._start is None:
            return
        if seq < self.next_seq:
            self._at, self.ended = self._start, False
        if near is not None and self.next_seq < near.seq <= seq:
            self._at = near
        while self.next_seq < seq and not self.ended and time.monotonic() < until:
            # Line by line only where one is longer than what is read at once, or a segment ends.
            if not self._leap(seq - self.next_seq) and not sum(1 for _ in self._lines(1)):
                return

    def _leap(self, limit: int) -> int:
        """Pass by complete lines in what is read at once, at most `limit`; how many they were."""
        place = self._at or Place(0, 0, 0)
        chunk = self._pread(place, LINE_BYTES + 1)
        count, end = chunk.count(b"\n"), chunk.rfind(b"\n")
        if count > limit:
            count, end = limit, -1
            for _ in range(limit):
                end = chunk.find(b"\n", end + 1)
        if count:
            self._at = Place(place.seq + count, place.segment, place.offset + end + 1)
        return count

    def read(self, limit: int = 256) -> list[Batch]:
        """The next complete batches, at most `limit`, none after READ_BYTES. Empty at the end of what is on disk."""
        if self._at is None and not self._read_header():
            return []
        batches, size = [], 0
        for seq, line in self._lines(limit):
            batch = parse(line, seq)
            size += len(line or b"")
            if batch is None:
                self.ended = True
                self._at = replace(self._at or Place(0, 0, 0), seq=seq)  # the end line is no batch
                break
            batches.append(batch)
            if size >= READ_BYTES:
                break
        return batches

    def _read_header(self) -> bool:
        """The header says who speaks; where it contradicts the file's name, or is none, nobody does."""
        self._at = Place(-1, 0, 0)
        for _, line in self._lines(1):
            self.header = parse_header(line, self.stream, self._named)
            self._start = self._at
            if self.header is None:
                self.ended = True
            return self.header is not None
        self._at = None
        return False

    def _lines(self, limit: int) -> Iterator[tuple[int, bytes | None]]:
        """Complete lines from the cursor on, moving it; None stands for one too long, or torn in a final segment.

        Of lines too long, each of which may take a whole segment's reading, few at once.
        """
        too_long = 0
        while limit > 0 and not self.ended and self._at is not None:
            chunk, final = self._chunk(self._at)
            start = 0
            while limit > 0 and (end := chunk.find(b"\n", start)) >= 0:
                self._at = Place(self._at.seq + 1, self._at.segment, self._at.offset + end + 1 - start)
                limit -= 1
                yield self._at.seq - 1, chunk[start:end] if end - start <= LINE_BYTES else None
                start = end + 1
            if limit == 0 or start > 0:
                continue  # there may be more after what was read at once
            if not chunk and final:
                if self._at.offset == 0:
                    self.ended = True  # ours are never empty: there may be any number of these
                    return
                self._at = Place(self._at.seq, self._at.segment + 1, 0)
            elif len(chunk) > LINE_BYTES or (chunk and final):
                place = self._skip(self._at)
                if place is None:
                    return
                self._at = place
                limit -= 1
                too_long += 1
                yield place.seq - 1, None
                if too_long == TOO_LONG_AT_ONCE:
                    return
            else:
                return

    def _chunk(self, place: Place) -> tuple[bytes, bool]:
        """What follows in this segment, and whether the segment is final because there is a next one."""
        # Asked before reading: a writer never touches a segment again once it has made the next.
        final = self._exists(place.segment + 1)
        return self._pread(place, LINE_BYTES + 1), final

    def _skip(self, place: Place) -> Place | None:
        """Past a line that has no end within bounds: to the next newline, or to the next segment if there is one."""
        offset = place.offset
        while offset < SEGMENT_BYTES:
            chunk = self._pread(Place(0, place.segment, offset), LINE_BYTES)
            if not chunk:
                break
            if (end := chunk.find(b"\n")) >= 0:
                return Place(place.seq + 1, place.segment, offset + end + 1)
            offset += len(chunk)
        if self._exists(place.segment + 1):
            return Place(place.seq + 1, place.segment + 1, 0)
        if offset >= SEGMENT_BYTES:
            self.ended = True  # a segment of ours never gets here
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

    def _pread(self, place: Place, size: int) -> bytes:
        if place.offset >= SEGMENT_BYTES:
            return b""
        try:
            file = os.open(
                self._segment(place.segment),
                os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC,
                dir_fd=self._directory,
            )
        except OSError:
            return b""
        try:
            if not stat.S_ISREG(os.fstat(file).st_mode):
                return b""
            return os.pread(file, size, place.offset)
        except OSError:
            return b""
        finally:
            os.close(file)


def spool_names(directory: int) -> list[str]:
    """First segments of the streams in an open spool folder, in order of incarnation, rank and name."""
    found = []
    with os.scandir(directory) as entries:
        for entry in islice(entries, ENTRIES):
            if (match := NAME.fullmatch(entry.name)) and entry.is_file(follow_symlinks=False):
                found.append((int(match["incarnation"]), int(match["rank"]), entry.name))
    return [name for _, _, name in sorted(found)]


def open_folder(path: str | os.PathLike[str]) -> int:
    """A descriptor of a folder itself, never of what a link points to."""
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)


def read_spool(path: str | os.PathLike[str], from_seq: int = 0) -> tuple[Header | None, list[Batch], bool]:
    """A whole stream at once, from a seq on: header, batches, and whether it has ended. For tests and small files."""
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
        return spool.header, batches, spool.ended
    finally:
        os.close(directory)
