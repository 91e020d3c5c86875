"""Logs as blocks of lines, whatever they are: files, folders, compressed ones, standard input. Nothing is trusted.

A file is read only if it is a plain one, without waiting for anybody, and within bounds: of one that is larger its head
and its tail, and the lines between are only counted.
"""

from __future__ import annotations

import gzip
import os
import stat
import time
import zlib
from collections.abc import Generator, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, Protocol, Self, cast

from jobs.postmortem.scan import BLOCK

WHOLE = 4 << 30  # bytes of all logs together that are read whole
HEAD, TAIL = 64 << 20, 256 << 20  # of each log, where all together are more
SECONDS = 60.0
MOST_FILES = 4096
# Of a folder, what is no log by its name.
SKIPPED = tuple(
    f".{kind}"
    for kind in (
        *("pt", "pth", "bin", "safetensors", "npy", "npz", "ckpt", "distcp", "arrow", "parquet"),
        *("png", "jpg", "so", "pyc", "zip", "tar"),
    )
)


class Unreadable(OSError):
    """A log that can't be read, in a sentence."""


class _Reads(Protocol):
    def read(self, size: int, /) -> bytes: ...


@dataclass(slots=True)
class Log:
    """One log to be read. `file` is open and a plain file, or a stream whose end nobody knows."""

    name: str
    file: BinaryIO
    size: int | None
    limits: list[str] = field(default_factory=list)
    below: BinaryIO | None = None  # what it is unpacked from

    def close(self) -> None:
        for file in filter(None, (self.file, self.below)):
            with suppress(OSError):
                file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()


def open_log(path: Path, name: str = "", *, follow: bool = True) -> Log:
    """Open one file; Unreadable where it is none, or nothing that has an end."""
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW)
    try:
        descriptor = os.open(path, flags)
    except OSError as error:
        raise Unreadable(f"{path}: {os.strerror(error.errno or 0)}") from None
    return of_descriptor(descriptor, name or str(path))


def of_descriptor(descriptor: int, name: str) -> Log:
    """The log that an open descriptor is; closed where it is none."""
    about = os.fstat(descriptor)
    if not stat.S_ISREG(about.st_mode):
        os.close(descriptor)
        kind = "a folder" if stat.S_ISDIR(about.st_mode) else "no plain file"
        raise Unreadable(f"{name}: it is {kind}")
    file = open(descriptor, "rb", buffering=0)  # noqa: SIM115 (the log closes it)
    if _is_gzip(file):
        return Log(name, cast(BinaryIO, gzip.GzipFile(fileobj=file, mode="rb")), None, below=file)
    return Log(name, file, about.st_size)


def _is_gzip(file: BinaryIO) -> bool:
    head = file.read(2)
    file.seek(0)
    return head == b"\x1f\x8b"


def under(folder: Path) -> Iterator[Path]:
    """The files of a folder that may be logs, in order; links are not followed."""
    found = 0
    for where, folders, names in os.walk(folder):
        folders.sort()
        for name in sorted(names):
            path = Path(where, name)
            if name.lower().endswith(SKIPPED) or path.is_symlink() or not path.is_file():
                continue
            found += 1
            if found > MOST_FILES:
                return
            yield path


def blocks(log: Log, *, is_cut: bool = False, until: float | None = None) -> Iterator[bytes]:
    """A log's lines in blocks, each of whole lines but where one is longer. `is_cut`: only head and tail.

    What lies between is replaced by as many empty lines, so that the others keep their numbers.
    """
    until = time.monotonic() + SECONDS if until is None else until
    if not is_cut or (log.size is not None and log.size <= HEAD + TAIL):
        yield from _lines(_until(log, log.file, None, until))
        return
    rest = yield from _lines_to(_until(log, log.file, HEAD, until))
    if log.size is None:
        log.limits.append(f"of what it holds only the first {HEAD >> 20} MiB were read")
        if rest:
            yield rest
        return
    start = max(HEAD, log.size - TAIL)
    passed = _count(log.file, start - HEAD, until)
    log.limits.append(f"of {log.size >> 20:,} MiB the first {HEAD >> 20} and the last {TAIL >> 20} were read")
    yield rest + b"\n" * passed
    yield from _lines(_until(log, log.file, None, until + SECONDS))


def _until(log: Log, file: _Reads, most: int | None, until: float) -> Iterator[bytes]:
    left = most
    read = getattr(file, "read1", file.read)  # what there is, rather than nothing of a block that is not whole
    while left is None or left > 0:
        try:
            chunk = read(BLOCK if left is None else min(BLOCK, left))
        except (OSError, EOFError, zlib.error) as error:
            log.limits.append(f"it could not be read to its end: {error}")
            return
        if not chunk:
            return
        if left is not None:
            left -= len(chunk)
        yield chunk
        if time.monotonic() > until:
            log.limits.append("it was not read to its end, as that took too long")
            return


def _lines(chunks: Iterator[bytes]) -> Iterator[bytes]:
    rest = yield from _lines_to(chunks)
    if rest:
        yield rest


def _lines_to(chunks: Iterator[bytes]) -> Generator[bytes, None, bytes]:
    """Blocks of whole lines; returns what is left of the last."""
    rest = b""
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


def _count(file: BinaryIO, size: int, until: float) -> int:
    """The lines of the next bytes, which are not read for what they say."""
    found = 0
    while size > 0 and time.monotonic() < until and (chunk := file.read(min(4 << 20, size))):
        found += chunk.count(b"\n")
        size -= len(chunk)
    if size > 0:
        file.seek(size, os.SEEK_CUR)
    return found
