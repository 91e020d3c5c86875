"""Files of a buffer: batches as lines of JSON, some dozens per file; full files are compressed.

000000000120.jsonl        begins with batch 120, and grows; a torn last line does not count
000000000060-60.jsonl.gz  batches 60 to 119
"""

from __future__ import annotations

import os
import re
import zlib
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_OPEN = re.compile(r"(?P<first>\d{12})\.jsonl")
_CLOSED = re.compile(r"(?P<first>\d{12})-(?P<count>\d{1,4})\.jsonl\.gz")
MAX_BYTES = 64 * 1024 * 1024  # of a segment, unpacked
_GZIP = 31


@dataclass
class BufferSegment:
    """Batches `first` … `first + count - 1`."""

    folder: Path
    first: int
    count: int
    is_closed: bool
    size: int
    closed_at: float = 0.0
    """Unix time of its last change."""

    @property
    def end(self) -> int:
        return self.first + self.count

    @property
    def path(self) -> Path:
        return self.folder / (
            f"{self.first:012d}-{self.count}.jsonl.gz" if self.is_closed else f"{self.first:012d}.jsonl"
        )

    def lines(self) -> list[bytes]:
        """Return its batches; from a damaged file those before the damage."""
        with open(self.path, "rb") as file:
            data = file.read(MAX_BYTES)
        return whole_lines(_unpacked(data) if self.is_closed else data)

    def compress(self) -> None:
        """Compress it to a file with its final name, and only then delete the original."""
        data, old_path = self.path.read_bytes(), self.path
        lines = whole_lines(data)
        squeeze = zlib.compressobj(level=6, wbits=_GZIP)
        packed = squeeze.compress(b"".join(line + b"\n" for line in lines)) + squeeze.flush()
        temporary = self.folder / f"{self.first:012d}.tmp"
        try:
            with open(temporary, "wb") as file:
                file.write(packed)
                file.flush()
                os.fsync(file.fileno())
            self.count = len(lines)
            os.replace(temporary, self.folder / f"{self.first:012d}-{self.count}.jsonl.gz")
        except OSError:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise
        self.is_closed, self.size = True, len(packed)
        old_path.unlink()

    def renumber(self, first: int) -> None:
        """Rename the file to start at another batch number."""
        old_path = self.path
        self.first = first
        os.rename(old_path, self.path)

    def remove(self) -> None:
        self.path.unlink(missing_ok=True)


def whole_lines(data: bytes) -> list[bytes]:
    return data[: data.rfind(b"\n") + 1].split(b"\n")[:-1]


def _unpacked(data: bytes) -> bytes:
    unpack = zlib.decompressobj(wbits=_GZIP)
    found = bytearray()
    with suppress(zlib.error):
        for start in range(0, len(data), 65_536):
            if len(found) < MAX_BYTES:
                found += unpack.decompress(data[start : start + 65_536], MAX_BYTES)
    return bytes(found)


def load_segments(folder: Path) -> list[BufferSegment]:
    """Return the segments that a previous agent left, in order; of one that was being compressed, the complete file."""
    closed: dict[int, BufferSegment] = {}
    unfinished: dict[int, BufferSegment] = {}
    for name in os.listdir(folder):
        path = folder / name
        if name.endswith(".tmp"):
            path.unlink(missing_ok=True)
        elif match := _CLOSED.fullmatch(name):
            first, stats = int(match["first"]), path.stat()
            closed[first] = BufferSegment(folder, first, int(match["count"]), True, stats.st_size, stats.st_mtime)
        elif match := _OPEN.fullmatch(name):
            first, stats = int(match["first"]), path.stat()
            count = len(whole_lines(path.read_bytes()))
            unfinished[first] = BufferSegment(folder, first, count, False, stats.st_size, stats.st_mtime)
    for first, segment in unfinished.items():
        if first in closed or not segment.count:
            segment.remove()
    segments = {first: segment for first, segment in unfinished.items() if segment.count} | closed
    return [segments[first] for first in sorted(segments)]
