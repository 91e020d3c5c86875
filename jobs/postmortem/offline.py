"""A verdict on files that somebody has at hand, without a portal: what `vigil diagnose` does."""

from __future__ import annotations

import io
import itertools
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from jobs.postmortem import reading, sources, stacks
from jobs.postmortem.diagnose import diagnose
from jobs.postmortem.reading import Log, Unreadable
from jobs.postmortem.scan import scan
from jobs.postmortem.scanned import Scanned
from jobs.postmortem.sieve import Sieve, sieve_of
from jobs.postmortem.sign import Sign
from jobs.postmortem.signatures import Catalogue, catalogue
from jobs.postmortem.sources import Flight
from jobs.postmortem.stacks import Stack
from jobs.postmortem.verdict import Verdict

STDIN = "-"


def logs_of(names: Sequence[str], stdin: BinaryIO | None = None) -> tuple[list[Log], list[str]]:
    """What is to be read, and what can't be: files, all of a folder, "-" for standard input."""
    found: list[Log] = []
    trouble: list[str] = []
    for name in names:
        if name == STDIN:
            found.append(Log("stdin", stdin or sys.stdin.buffer, None))
            continue
        path = Path(name)
        is_folder = path.is_dir()
        for one in reading.under(path) if is_folder else [path]:
            try:
                found.append(
                    reading.open_log(one, str(one.relative_to(path)) if is_folder else name, follow=not is_folder)
                )
            except Unreadable as error:
                trouble.append(str(error))
    return found, trouble


@dataclass(slots=True)
class Read:
    """Everything that was at hand, read once."""

    scanned: list[Scanned] = field(default_factory=list)
    records: list[Sign] = field(default_factory=list)
    flights: list[Flight] = field(default_factory=list)
    stacks: list[Stack] = field(default_factory=list)
    kinds: set[str] = field(default_factory=set)


def read(logs: Iterable[Log], known: Catalogue) -> Read:
    """Every log, once; they are closed."""
    logs = list(logs)
    sieve = sieve_of(known)
    is_cut = sum(log.size or 0 for log in logs) > reading.WHOLE
    found = Read()
    for log in logs:
        _read(log, sieve, is_cut, found)
        log.close()
    return found


def _read(log: Log, sieve: Sieve, is_cut: bool, found: Read) -> None:
    blocks = reading.blocks(log, is_cut=is_cut)
    head = next(blocks, b"")
    kind = sources.kind_of(head)
    found.kinds.add(kind)
    if kind in {"sacct", "scontrol", "flight", "stacks"}:
        text = _text(head, blocks)
        if kind == "flight":
            found.flights += filter(None, [sources.flight_of(log.name, text)])
        elif kind == "stacks":
            found.stacks += stacks.read(log.name, text)
        else:
            found.records += sources.signs_of_record(kind, log.name, text)
        return
    scanned = scan(sieve, log.name, itertools.chain([head], blocks))
    scanned.kind = kind
    scanned.limits += log.limits
    found.scanned.append(scanned)


def _text(head: bytes, blocks: Iterable[bytes]) -> str:
    parts, size = [head], len(head)
    for block in blocks:
        if size > sources.MOST:
            break
        parts.append(block)
        size += len(block)
    return b"".join(parts).replace(b"\0", b"").decode(errors="replace")


def verdict_on(logs: Iterable[Log], known: Catalogue | None = None) -> Verdict:
    """The verdict on several logs of one run."""
    known = known or catalogue()
    found = read(logs, known)
    records = [*found.records, *sources.signs_of_flights(found.flights), *stacks.signs_of(found.stacks)]
    return diagnose(found.scanned, known, records=records, seen=found.kinds)


def logs_of_texts(texts: Mapping[str, str]) -> list[Log]:
    """Logs that are in memory, by their names."""
    return [log_of_text(text, name) for name, text in texts.items()]


def log_of_text(text: str | bytes, name: str) -> Log:
    """A log that is in memory."""
    data = text.encode() if isinstance(text, str) else text
    return Log(name, io.BytesIO(data), len(data))


def diagnose_text(text: str | bytes, name: str = "log", known: Catalogue | None = None) -> Verdict:
    """The verdict on one log that is in memory."""
    return verdict_on([log_of_text(text, name)], known)
