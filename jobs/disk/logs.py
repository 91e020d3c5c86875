"""Read logs of ranks and launchers in place: bounded, in pages, and never through a link.

A cursor is the byte offset of a line's beginning: following costs nothing, and a page's address keeps its meaning.
Lines are UTF-8 with invalid bytes replaced; colours and other control sequences are left to the caller.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from jobs.disk import rundir
from jobs.disk.folders import find_folder, root_of
from jobs.errors import LogError
from jobs.models import Attempt, Job

MAX_LINES = 2_000
PAGE_BYTES = 1 << 20  # of one answer
SEARCH_BYTES = 16 << 20  # searched for one response
PIECE_BYTES = 256 << 10  # of a download
LINE_BYTES = 16 << 10  # of one line; the rest of a longer one is left out
BATCH = "batch"
"""Name of the batch script's output, in place of a rank."""
_RANK = re.compile(r"(\d{1,9})\.(\d{1,9})\.log\Z")
_LAUNCHER = re.compile(r"launcher\.(\d{1,9})\.log\Z")


@dataclass(frozen=True)
class LogFile:
    """An existing log. Launchers have negative ranks, −node−1; None is the batch script's output."""

    rank: int | None
    incarnation: int
    bytes: int


@dataclass(frozen=True)
class LogSelection:
    """Selects a log of an attempt, and the lines of it that contain `search`. Ranks are those of `LogFile`."""

    attempt: Attempt
    rank: int | None = 0
    incarnation: int | None = None
    """None selects the newest that exists."""
    search: str = ""

    @property
    def name(self) -> str:
        return BATCH if self.rank is None else str(self.rank)


@dataclass(frozen=True)
class LogLine:
    offset: int  # of its first byte
    text: str


@dataclass(frozen=True)
class LogPage:
    """Lines in order. `start` and `end` are cursors: `before=start` reads what precedes, `after=end` what follows."""

    lines: list[LogLine]
    start: int
    end: int
    size: int  # of the whole log, in bytes

    @property
    def more_before(self) -> bool:
        return self.start > 0

    @property
    def more_after(self) -> bool:
        return self.end < self.size


def available(attempt: Attempt) -> list[LogFile]:
    """Return the logs of an attempt: ranks by incarnation, then launchers, then the batch script's output."""
    logs = []
    root, folder = root_of(attempt), find_folder(attempt)
    if root is None:
        return []
    if folder:
        for name in rundir.names_under(root, f"job/{folder}/logs"):
            if (size := _size(root, f"job/{folder}/logs/{name}")) is None:
                continue
            if match := _RANK.match(name):
                logs.append(LogFile(int(match[2]), int(match[1]), size))
            elif match := _LAUNCHER.match(name):
                logs.append(LogFile(-1 - int(match[1]), 0, size))
    logs.sort(key=lambda log: (log.rank is not None and log.rank < 0, log.incarnation, abs(log.rank or 0)))
    if (size := _size(root, batch_log(attempt))) is not None:
        logs.append(LogFile(None, 0, size))
    return logs


def read(
    job: Job, selection: LogSelection, *, after: int | None = None, before: int | None = None, limit: int = 500
) -> LogPage:
    """Return a page of a log: the last lines, lines `after` or `before` a cursor, or lines that match the search.

    Raises LogError if there is no such log.
    """
    _check_job(job, selection)
    limit = max(1, min(limit, MAX_LINES))
    with _opened(selection) as (descriptor, size):
        if selection.search:
            return _search(descriptor, size, after or 0, limit, selection.search.casefold())
        if after is not None:
            return _forwards(descriptor, size, after, limit, whole=not selection.attempt.is_alive)
        return _backwards(descriptor, size, size if before is None else min(before, size), limit)


@dataclass(frozen=True)
class LogDownload:
    """A whole log as it is now: a file name, and its bytes piece by piece."""

    name: str
    pieces: Iterator[bytes]


def download(job: Job, selection: LogSelection) -> LogDownload:
    """Return all of a log, terminal colours included. Raises LogError if there is no such log."""
    _check_job(job, selection)
    attempt, rank, incarnation = selection.attempt, selection.rank, selection.incarnation
    if rank is not None and rank >= 0 and incarnation is None:
        incarnation = _newest(attempt, rank)
        selection = replace(selection, incarnation=incarnation)
    with _opened(selection):
        pass  # a missing log is reported now, before the response has begun
    what = BATCH if rank is None else f"rank-{rank}" if rank >= 0 else f"launcher-{-1 - rank}"
    start = f"-start-{incarnation + 1}" if incarnation and rank is not None and rank >= 0 else ""
    return LogDownload(f"job-{job.pk}.{attempt.number}-{what}{start}.log", _pieces(selection))


def _check_job(job: Job, selection: LogSelection) -> None:
    if selection.attempt.job_id != job.pk:
        raise LogError(f"#{job.pk} has no attempt with that id.")


def _pieces(selection: LogSelection) -> Iterator[bytes]:
    """Yield the log up to its size at the first read; a log that keeps growing would never end."""
    with _opened(selection) as (descriptor, size):
        at = 0
        while at < size and (piece := os.pread(descriptor, min(PIECE_BYTES, size - at), at)):
            at += len(piece)
            yield piece


@contextmanager
def _opened(selection: LogSelection) -> Iterator[tuple[int, int]]:
    """Open the log. Yield its descriptor and its present size."""
    root, relative = _locate(selection)
    writer = writer_of(selection.rank)
    try:
        descriptor = rundir.open_under(root, relative)
    except FileNotFoundError:
        raise LogError(f"{writer} has not written a log in attempt {selection.attempt.number} yet.") from None
    except OSError as error:
        raise LogError(f"The log of {writer} cannot be read: {error}.") from None
    try:
        yield descriptor, os.fstat(descriptor).st_size
    finally:
        os.close(descriptor)


def _locate(selection: LogSelection) -> tuple[Path, str]:
    """Return the run directory and the path of a log. Only numbers go into the name, so no request leads elsewhere."""
    attempt, rank, incarnation = selection.attempt, selection.rank, selection.incarnation
    root, folder = root_of(attempt), find_folder(attempt)
    if attempt.job.is_attached:
        raise LogError(
            f"sbatch started #{attempt.job_id}: its output is where that put it, by default slurm-<number>.out."
        )
    if root is None:
        raise LogError(f"Attempt {attempt.number} has not started: there is no log yet.")
    if rank is None:
        return root, batch_log(attempt)
    if not folder:
        raise LogError(f"Attempt {attempt.number} has not started: there is no log yet.")
    if rank < 0:
        return root, f"job/{folder}/logs/launcher.{-1 - rank}.log"
    if incarnation is None:
        incarnation = _newest(attempt, rank)
    return root, f"job/{folder}/logs/{int(incarnation)}.{int(rank)}.log"


def _newest(attempt: Attempt, rank: int) -> int:
    return max((log.incarnation for log in available(attempt) if log.rank == rank), default=0)


def batch_log(attempt: Attempt) -> str:
    """Return the path of the batch script's output in the run directory.

    Requeued attempts append to the first one's.
    """
    same = Attempt.objects.filter(job_id=attempt.job_id, scheduler_id=attempt.scheduler_id).exclude(scheduler_id="")
    first = same.order_by("number").values_list("number", flat=True).first()
    return f"job/batch.{first or attempt.number}.log"


def writer_of(rank: int | None) -> str:
    """Return who wrote a log, as a sentence begins with it."""
    if rank is None:
        return "The batch script"
    return f"Rank {rank}" if rank >= 0 else f"The launcher of node {-1 - rank}"


def _size(root: Path, relative: str) -> int | None:
    try:
        descriptor = rundir.open_under(root, relative)
    except OSError:
        return None
    try:
        return os.fstat(descriptor).st_size
    finally:
        os.close(descriptor)


def _forwards(descriptor: int, size: int, after: int, limit: int, *, whole: bool) -> LogPage:
    """Return lines from a cursor on. While the log may grow, an incomplete last line is left for the next page."""
    start = min(max(0, after), size)
    data = os.pread(descriptor, PAGE_BYTES, start)
    is_last = start + len(data) >= size
    is_cut = len(data) == PAGE_BYTES and b"\n" not in data
    lines, end = _lines(data, start, limit, take_rest=(whole and is_last) or is_cut)
    return LogPage(lines, start, end, size)


def _backwards(descriptor: int, size: int, before: int, limit: int) -> LogPage:
    """Return the last lines that end before a cursor."""
    start = max(0, before - PAGE_BYTES)
    data = os.pread(descriptor, before - start, start)
    if start > 0:  # begin at a line's beginning
        cut = data.find(b"\n") + 1
        data, start = data[cut:], start + cut
    at = len(data) - 1 if data.endswith(b"\n") else len(data)
    for _ in range(limit):
        at = data.rfind(b"\n", 0, max(at, 0))
        if at < 0:
            break
    data, start = data[at + 1 :], start + at + 1
    lines, end = _lines(data, start, limit, take_rest=True)
    return LogPage(lines, start, end, size)


def _search(descriptor: int, size: int, after: int, limit: int, wanted: str) -> LogPage:
    """Return lines from a cursor on that contain a text in any case.

    Reads a bounded part; `end` is where it stopped.
    """
    start = at = min(max(0, after), size)
    matches: list[LogLine] = []
    while at < size and at - start < SEARCH_BYTES and len(matches) < limit:
        data = os.pread(descriptor, PAGE_BYTES, at)
        if not data:
            break
        lines, end = _lines(data, at, len(data) + 1, take_rest=at + len(data) >= size or b"\n" not in data)
        for line in lines:
            if wanted in line.text.casefold():
                matches.append(line)
                if len(matches) == limit:
                    newline = data.find(b"\n", line.offset - at)
                    end = at + newline + 1 if newline >= 0 else end
                    break
        at = end
    return LogPage(matches, start, at, size)


def _lines(data: bytes, start: int, limit: int, *, take_rest: bool) -> tuple[list[LogLine], int]:
    """Return the lines of a piece that begins at a line's beginning, and the offset after the last one."""
    lines: list[LogLine] = []
    at = 0
    while at < len(data) and len(lines) < limit:
        end = data.find(b"\n", at)
        if end < 0 and not take_rest:
            break
        stop = len(data) if end < 0 else end
        text = data[at : min(stop, at + LINE_BYTES)].decode("utf-8", "replace").rstrip("\r")
        lines.append(LogLine(start + at, text))
        at = stop + (end >= 0)
    return lines, start + at
