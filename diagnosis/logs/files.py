"""Read logs in blocks of lines: files, folders, compressed files and standard input. Nothing in them is trusted.

A file is read only if it is a regular file, without blocking and within bounds. From a larger file the head and the
tail are read, and the lines between are only counted.
"""

from __future__ import annotations

import gzip
import math
import os
import stat
import time
import zlib
from collections.abc import Generator, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, Self, cast

BLOCK = 256 * 1024  # bytes that are read at a time
READ_WHOLE_BYTES = 4 << 30  # bytes of all logs together that are read whole
HEAD_BYTES, TAIL_BYTES = 64 << 20, 256 << 20  # of each log, where all together are more
SECONDS = 60.0  # for all logs together, in which everything is read
TAIL_SECONDS = 30.0  # more, in which their tails are; after that the last block of each
MAX_FILES = 4096
# Files in folders that are not logs.
SKIPPED_SUFFIXES = tuple(
    f".{kind}"
    for kind in (
        *("pt", "pth", "bin", "safetensors", "npy", "npz", "ckpt", "distcp", "arrow", "parquet"),
        *("png", "jpg", "so", "pyc", "zip", "tar"),
    )
)


class Unreadable(OSError):
    """Raised for a log that cannot be read; the message says why."""


@dataclass(slots=True)
class Log:
    """One log to read. `file` is an open regular file, or a stream of unknown size (`size` in bytes, else None)."""

    name: str
    file: BinaryIO
    size: int | None
    limits: list[str] = field(default_factory=list)
    below: BinaryIO | None = None  # the compressed file

    def close(self) -> None:
        for file in filter(None, (self.file, self.below)):
            with suppress(OSError):
                file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()


def open_log(path: Path, name: str = "", *, follow: bool = True) -> Log:
    """Open one file. Raises Unreadable if it does not exist or is not a regular file."""
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW)
    try:
        descriptor = os.open(path, flags)
    except OSError as error:
        raise Unreadable(f"{path}: {os.strerror(error.errno or 0)}") from None
    return log_from_descriptor(descriptor, name or str(path))


def log_from_descriptor(descriptor: int, name: str) -> Log:
    """Return the log behind an open descriptor. Closes it and raises Unreadable if it is not a regular file."""
    about = os.fstat(descriptor)
    if not stat.S_ISREG(about.st_mode):
        os.close(descriptor)
        kind = "a folder" if stat.S_ISDIR(about.st_mode) else "not a regular file"
        raise Unreadable(f"{name}: {kind}")
    file = open(descriptor, "rb", buffering=0)  # noqa: SIM115 (the log closes it)
    if _is_gzip(file):
        return Log(name, cast(BinaryIO, gzip.GzipFile(fileobj=file, mode="rb")), None, below=file)
    return Log(name, file, about.st_size)


def _is_gzip(file: BinaryIO) -> bool:
    head = file.read(2)
    file.seek(0)
    return head == b"\x1f\x8b"


def files_under(folder: Path) -> Iterator[Path]:
    """Yield the files of a folder that may be logs, in order, at most `MAX_FILES`; links are not followed."""
    file_count = 0
    for where, folders, names in os.walk(folder):
        folders.sort()
        for name in sorted(names):
            path = Path(where, name)
            if name.lower().endswith(SKIPPED_SUFFIXES) or path.is_symlink() or not path.is_file():
                continue
            file_count += 1
            if file_count > MAX_FILES:
                return
            yield path


def read_blocks(log: Log, *, is_cut: bool = False, until: float | None = None) -> Iterator[bytes]:
    """Yield a log in blocks of whole lines, except where one line is longer than a block.

    With `is_cut`, or after `until` (monotonic seconds; other logs may have used up the time), only head and tail are
    read. The part between is replaced by as many empty lines, so that line numbers stay right.
    """
    until = time.monotonic() + SECONDS if until is None else until
    is_cut = is_cut and (log.size is None or log.size > HEAD_BYTES + TAIL_BYTES)
    rest = yield from _whole_lines(_read_until(log, HEAD_BYTES if is_cut else None, until))
    if log.size is not None:
        rest = yield from _read_tail(log, log.size, rest, until + TAIL_SECONDS)
    if rest:
        yield rest


def _read_tail(log: Log, size: int, rest: bytes, late: float) -> Generator[bytes, None, bytes]:
    """Read what is left of a log that was not read to its end: its last part, and the very end whatever time it is."""
    left_out = 0
    for most, moment in ((TAIL_BYTES, late), (BLOCK, math.inf)):
        at = log.file.tell()
        if at >= size:
            break
        between = max(0, size - most - at)
        passed = _skip_and_count(log.file, between, late)
        left_out += between
        if passed:
            yield rest + b"\n"
            rest = b""
        for start in range(1, passed, BLOCK):
            yield b"\n" * min(BLOCK, passed - start)
        rest = yield from _whole_lines(_read_until(log, None, moment), rest)
    if left_out:
        log.limits.append(f"of {size / 2**20:,.1f} MiB {left_out / 2**20:,.1f} in the middle were skipped")
    return rest


def _read_until(log: Log, most: int | None, until: float) -> Iterator[bytes]:
    """Yield the next blocks until a moment; one block in any case."""
    left = most
    read = getattr(log.file, "read1", log.file.read)  # what there is, rather than nothing of a block that is not whole
    while left is None or left > 0:
        try:
            chunk = read(BLOCK if left is None else min(BLOCK, left))
        except (OSError, EOFError, zlib.error) as error:
            log.limits.append(f"not read to its end: {error}")
            return
        if not chunk:
            return
        if left is not None:
            left -= len(chunk)
        yield chunk
        if time.monotonic() > until:
            break
    if log.size is None:
        log.limits.append("only the beginning was read, as it is too long")


def _whole_lines(chunks: Iterator[bytes], rest: bytes = b"") -> Generator[bytes, None, bytes]:
    """Yield blocks of whole lines and return what is left of the last line. `rest` is what was left before."""
    for chunk in chunks:
        end = chunk.rfind(b"\n") + 1
        if end:
            yield rest + chunk[:end]
            rest = chunk[end:]
        elif len(rest) + len(chunk) > 4 * BLOCK:
            yield rest + chunk
            rest = b""
        else:
            rest += chunk
    return rest


def _skip_and_count(file: BinaryIO, size: int, until: float) -> int:
    """Skip the next bytes and return how many lines they have."""
    found = 0
    with suppress(OSError):
        while size > 0 and time.monotonic() < until and (chunk := file.read(min(4 << 20, size))):
            found += chunk.count(b"\n")
            size -= len(chunk)
    if size > 0:
        file.seek(size, os.SEEK_CUR)
    return found
