"""A verdict on files that somebody has at hand, without a portal: what `vigil diagnose` does."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import BinaryIO

from jobs.postmortem import reading
from jobs.postmortem.diagnose import diagnose
from jobs.postmortem.reading import Log, Unreadable
from jobs.postmortem.scan import Scanned, Sieve, scan
from jobs.postmortem.signatures import Catalogue, catalogue
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
                found.append(reading.open_log(one, str(one.relative_to(path)) if is_folder else name, follow=not is_folder))
            except Unreadable as error:
                trouble.append(str(error))
    return found, trouble


def read(logs: Iterable[Log], known: Catalogue) -> list[Scanned]:
    """Every log, once; they are closed."""
    logs = list(logs)
    sieve = Sieve(known)
    is_cut = sum(log.size or 0 for log in logs) > reading.WHOLE
    found = []
    for log in logs:
        scanned = scan(sieve, log.name, reading.blocks(log, is_cut=is_cut))
        scanned.limits += log.limits
        log.close()
        found.append(scanned)
    return found


def diagnose_text(text: str | bytes, name: str = "log", known: Catalogue | None = None) -> Verdict:
    """The verdict on one log that is in memory."""
    known = known or catalogue()
    data = text.encode() if isinstance(text, str) else text
    return diagnose([scan(Sieve(known), name, [data])], known)
