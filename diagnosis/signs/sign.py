"""Define a sign: something in a log or a record that may be the cause of a failure, or follow from it."""

from __future__ import annotations

import re
import signal
from dataclasses import KW_ONLY, dataclass, field
from functools import cache
from typing import Literal

from diagnosis.logs.prefixes import Prefix
from diagnosis.logs.tracebacks import Traceback
from diagnosis.signatures.entry import Entry

# 0.3.log of an incarnation's rank 3, rank_3.log, train-rank3.err, attempt_0/3/stderr.log.
_RANK = re.compile(
    r"(?:^|/)(?:\d{1,6}\.(\d{1,6})\.log|(?:[^/]*[_.-])?rank[_.-]?(\d{1,6})(?:\D[^/]*)?|(\d{1,6})/std(?:err|out)\.log)$"
)


@cache
def rank_in_file_name(name: str) -> int | None:
    """Return the rank that a log belongs to by its file name, or None."""
    found = _RANK.search(name)
    return int(next(filter(None, found.groups()))) if found else None


Witness = Literal["machine", "scheduler", "launcher", "program"]
# Kinds of sources (`Sign.source_kind`) that are the machine or the scheduler. All others relay what a job wrote.
_WITNESSES: dict[str, Witness] = {
    "kernel": "machine",
    "snapshot": "machine",
    "telemetry": "machine",
    "slurm": "scheduler",
}
PRINTED = "printed"
"""The kind of a source: a job's log that quotes a kernel."""


@dataclass(slots=True)
class Sign:
    """Something that may be the cause of a failure, or follow from it.

    `at` in Unix seconds; `survived` says why it is not a cause after all; `line` is 0 for records without lines.
    """

    file: str
    line: int
    text: str
    _: KW_ONLY
    cause: str
    role: str
    prefix: Prefix
    entry: Entry | None = None
    traceback: Traceback | None = None
    operations: tuple[str, ...] = ()
    count: int = 1
    at: float | None = None
    survived: str = ""  # why it is not a cause after all
    groups: dict[str, str] = field(default_factory=dict)
    source_kind: str = ""  # kernel, slurm, flight …; empty where the entry's scope says it
    is_from_job_folder: bool = False
    """Whether the launcher left it in the job's folder, where the job itself can write anything."""

    @property
    def witness(self) -> Witness:
        """Return who reported the sign.

        Any program may print what looks like a kernel line, or write one to its folder.
        """
        found = _WITNESSES.get(self.source_kind, "program")
        return "launcher" if found == "machine" and self.is_from_job_folder else found

    @property
    def rank(self) -> int | None:
        if self.prefix.rank is not None:
            return self.prefix.rank
        group = self.groups.get("rank", "")
        if group.isdigit() and len(group) < 8:
            return int(group)
        return self.prefix.local_rank if self.prefix.local_rank is not None else rank_in_file_name(self.file)

    @property
    def node(self) -> str:
        return self.groups.get("node", "") or self.prefix.node

    @property
    def is_generic(self) -> bool:
        return self.entry is not None and self.entry.is_generic

    @property
    def scope(self) -> str:
        return self.source_kind or (self.entry.scope if self.entry is not None else "program")


_WORDS = {
    "killed": 9,
    "segmentation fault": 11,
    "segfault": 11,
    "bus error": 7,
    "aborted": 6,
    "terminated": 15,
    "illegal instruction": 4,
    "floating point exception": 8,
    "out of memory": 9,
}
_CODES = ("code", "exit", "command", "status", "seff")  # groups, as one pattern has a name only once
_SIGNALS = ("signal", "number", "ps", "ucx")


def exit_code_of(sign: Sign) -> int:
    """Return the exit code that a line reports, 128 + number for a signal; 1 if it names neither."""
    for name in _CODES:
        group = sign.groups.get(name, "")
        if group.lstrip("-").isdigit():
            code = int(group[:6])
            return 128 - code if code < 0 else code
    for name in _SIGNALS:
        if word := sign.groups.get(name, "").lower().removeprefix("signal "):
            number = int(word[:3]) if word.isdigit() else _WORDS.get(word) or _signal_number(word)
            return 128 + number if number else 1
    return 1


def _signal_number(word: str) -> int:
    """Return the number of SIGKILL or KILL; 0 if there is no such signal."""
    name = word.upper()
    found = signal.Signals.__members__.get(name if name.startswith("SIG") else f"SIG{name}")
    return int(found) if found is not None else 0
