"""Files of a buffer: batches as lines of JSON, some dozens a file; those that are full are squeezed.

000000000120.jsonl        begins with batch 120, and grows; a torn last line is none
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
MOST_BYTES = 64 * 1024 * 1024  # of a segment, unpacked
_GZIP = 31


@dataclass
class Segment:
    """Batches `first` … `first + count - 1`."""

    folder: Path
    first: int
    count: int
    is_closed: bool
    size: int
    closed_at: float = 0.0
    """Unix time of its last change."""

    @property
    def after(self) -> int:
        return self.first + self.count

    @property
    def path(self) -> Path:
        return self.folder / (
            f"{self.first:012d}-{self.count}.jsonl.gz" if self.is_closed else f"{self.first:012d}.jsonl"
        )

    def lines(self) -> list[bytes]:
        """Its batches; of a damaged file those before the damage."""
        with open(self.path, "rb") as file:
            data = file.read(MOST_BYTES)
        return whole_lines(_unpacked(data) if self.is_closed else data)

    def squeeze(self) -> None:
        """Close it: a file under its new name, whole, and only then the old one gone."""
        data, before = self.path.read_bytes(), self.path
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
        before.unlink()

    def move(self, first: int) -> None:
        """Number it anew."""
        before = self.path
        self.first = first
        os.rename(before, self.path)

    def remove(self) -> None:
        self.path.unlink(missing_ok=True)


def whole_lines(data: bytes) -> list[bytes]:
    return data[: data.rfind(b"\n") + 1].split(b"\n")[:-1]


def _unpacked(data: bytes) -> bytes:
    unpack = zlib.decompressobj(wbits=_GZIP)
    found = bytearray()
    with suppress(zlib.error):
        for start in range(0, len(data), 65_536):
            if len(found) < MOST_BYTES:
                found += unpack.decompress(data[start : start + 65_536], MOST_BYTES)
    return bytes(found)


def found_in(folder: Path) -> list[Segment]:
    """What an agent before has left, in order; of a segment that was being squeezed one is kept."""
    closed: dict[int, Segment] = {}
    begun: dict[int, Segment] = {}
    for name in os.listdir(folder):
        path = folder / name
        if name.endswith(".tmp"):
            path.unlink(missing_ok=True)
        elif match := _CLOSED.fullmatch(name):
            first, told = int(match["first"]), path.stat()
            closed[first] = Segment(folder, first, int(match["count"]), True, told.st_size, told.st_mtime)
        elif match := _OPEN.fullmatch(name):
            first, told = int(match["first"]), path.stat()
            count = len(whole_lines(path.read_bytes()))
            begun[first] = Segment(folder, first, count, False, told.st_size, told.st_mtime)
    for first, segment in begun.items():
        if first in closed or not segment.count:
            segment.remove()
    kept = {first: one for first, one in begun.items() if one.count} | closed
    return [kept[first] for first in sorted(kept)]
