"""Diagnose log files without a portal, as `vigil diagnose` does."""

from __future__ import annotations

import io
import itertools
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import BinaryIO

from diagnosis.diagnose import diagnose
from diagnosis.logs import files, json_records
from diagnosis.logs.files import Log, Unreadable
from diagnosis.scanned_log import ScannedLog
from diagnosis.scanner import scan
from diagnosis.signatures.catalogue import Catalogue, shipped_catalogue
from diagnosis.signatures.prefilter import Prefilter, prefilter_of
from diagnosis.signs import flight_recorder, slurm_records, stacks
from diagnosis.signs.flight_recorder import FlightRecord
from diagnosis.signs.sign import Sign
from diagnosis.signs.stacks import ProcessStack
from diagnosis.source_kind import kind_of
from diagnosis.verdict import Verdict

STDIN = "-"
MAX_CALLS = 1 << 19  # in all flight recorders together
MAX_RECORDS = 4_096  # of a scheduler, or stacks; at most twice that


def open_logs(names: Sequence[str], stdin: BinaryIO | None = None) -> tuple[list[Log], list[str]]:
    """Open files, all files of folders, and "-" for standard input.

    Returns the logs and a sentence on each that failed.
    """
    logs: list[Log] = []
    trouble: list[str] = []
    for name in names:
        if name == STDIN:
            logs.append(Log("stdin", stdin or sys.stdin.buffer, None))
            continue
        path = Path(name)
        is_folder = path.is_dir()
        for file in files.files_under(path) if is_folder else [path]:
            try:
                logs.append(
                    files.open_log(file, str(file.relative_to(path)) if is_folder else name, follow=not is_folder)
                )
            except Unreadable as error:
                trouble.append(str(error))
    return logs, trouble


@dataclass(slots=True)
class ReadLogs:
    """Everything that was at hand, read once."""

    scanned: list[ScannedLog] = field(default_factory=list)
    records: list[Sign] = field(default_factory=list)
    flights: list[FlightRecord] = field(default_factory=list)
    stacks: list[ProcessStack] = field(default_factory=list)
    kinds: set[str] = field(default_factory=set)
    left_out: list[str] = field(default_factory=list)
    """Names of record files that were skipped for lack of time or space."""

    @property
    def is_full(self) -> bool:
        """Return whether it holds more records than one run ever has."""
        calls = sum(len(flight.started) for flight in self.flights)
        return calls >= MAX_CALLS or len(self.records) >= MAX_RECORDS or len(self.stacks) >= MAX_RECORDS

    @property
    def unavailable(self) -> list[str]:
        more = f" and {len(self.left_out) - 1:,} more files" if len(self.left_out) > 1 else ""
        return [f"{self.left_out[0]}{more}: skipped, too much to read"] if self.left_out else []


_OF_JOBS = frozenset({"log", "flight", "stacks"})  # kinds of files that a job writes itself


def read_logs(logs: Iterable[Log], catalogue: Catalogue, *, size: int | None = None, of_job: bool = False) -> ReadLogs:
    """Read every log once; each is closed before the next is opened.

    `size` is the total in bytes, computed if omitted: above `files.READ_WHOLE_BYTES` only head and tail of each log
    are read. `of_job` marks logs that a job wrote: what looks like a kernel log or a scheduler's record is then still
    the job's output.
    """
    if size is None:
        logs = list(logs)
        size = sum(log.size or 0 for log in logs)
    prefilter = prefilter_of(catalogue)
    until = time.monotonic() + files.SECONDS
    result = ReadLogs()
    for log in logs:
        with log:
            _read(log, prefilter, size > files.READ_WHOLE_BYTES, until, result, of_job)
    return result


def _read(log: Log, prefilter: Prefilter, is_cut: bool, until: float, found: ReadLogs, of_job: bool) -> None:
    blocks = files.read_blocks(log, is_cut=is_cut, until=until)
    head = next(blocks, b"")
    kind = kind_of(head)
    kind = kind if kind in _OF_JOBS or not of_job else "log"
    if kind in {"sacct", "scontrol", "flight", "stacks"}:
        if time.monotonic() > until or found.is_full:
            found.left_out.append(log.name)
            return
        found.kinds.add(kind)
        text = _text(
            head, blocks, slurm_records.MAX_BYTES if kind in {"sacct", "scontrol"} else flight_recorder.MAX_BYTES
        )
        if kind == "flight":
            found.flights += filter(None, [flight_recorder.parse_flight(log.name, text)])
        elif kind == "stacks":
            found.stacks += stacks.parse_stacks(log.name, text)
        else:
            found.records += slurm_records.signs_of_record(kind, log.name, text)[:MAX_RECORDS]
        return
    expansions = json_records.LineExpansions()
    lines = json_records.as_text(itertools.chain([head], blocks), expansions)
    head = next(lines)
    kind = "kernel" if kind == "log" and not of_job and kind_of(head) == "kernel" else kind
    found.kinds.add(kind)
    scanned = scan(prefilter, log.name, itertools.chain([head], lines))
    scanned.kind, scanned.is_from_job = kind, of_job
    scanned.expansions = expansions
    scanned.limits += log.limits
    found.scanned.append(scanned)


def _text(head: bytes, blocks: Iterable[bytes], most: int) -> str:
    parts, size = [head], len(head)
    for block in blocks:
        if size > most:
            break
        parts.append(block)
        size += len(block)
    return b"".join(parts).replace(b"\0", b"").decode(errors="replace")


def diagnose_logs(logs: Iterable[Log], catalogue: Catalogue | None = None) -> Verdict:
    """Return the verdict on several logs of one run, with the shipped catalogue unless another is given."""
    catalogue = catalogue or shipped_catalogue()
    found = read_logs(logs, catalogue)
    records = [*found.records, *flight_recorder.signs_of_flights(found.flights), *stacks.signs_of_stacks(found.stacks)]
    verdict = diagnose(found.scanned, catalogue, records=records, available=found.kinds)
    return replace(verdict, unavailable=[*found.unavailable, *verdict.unavailable])


def logs_from_texts(texts: Mapping[str, str]) -> list[Log]:
    """Return logs that are in memory, given by name."""
    return [log_from_text(text, name) for name, text in texts.items()]


def log_from_text(text: str | bytes, name: str) -> Log:
    """Return one log that is in memory."""
    data = text.encode() if isinstance(text, str) else text
    return Log(name, io.BytesIO(data), len(data))


def diagnose_text(text: str | bytes, name: str = "log", catalogue: Catalogue | None = None) -> Verdict:
    """Return the verdict on one log that is in memory."""
    return diagnose_logs([log_from_text(text, name)], catalogue)
