"""A sign: something in a log or a record that may be the cause of a failure, or came of it."""

from __future__ import annotations

from dataclasses import dataclass, field

from jobs.postmortem.prefixes import Prefix
from jobs.postmortem.signatures import Entry
from jobs.postmortem.tracebacks import Traceback


@dataclass(slots=True)
class Sign:
    """Something that may be the cause, or came of it."""

    file: str
    line: int
    text: str
    cause: str
    role: str
    prefix: Prefix
    entry: Entry | None = None
    traceback: Traceback | None = None
    doing: tuple[str, ...] = ()
    count: int = 1
    at: float | None = None
    survived: str = ""  # why it is no cause after all
    groups: dict[str, str] = field(default_factory=dict)
    of: str = ""  # slurm or flight: of a record, not of a line in a log

    @property
    def rank(self) -> int | None:
        if self.prefix.rank is not None:
            return self.prefix.rank
        told = self.groups.get("rank", "")
        return int(told) if told.isdigit() and len(told) < 8 else self.prefix.local_rank

    @property
    def node(self) -> str:
        return self.groups.get("node", "") or self.prefix.node

    @property
    def is_generic(self) -> bool:
        return self.of == "course" or (self.entry is not None and self.entry.is_generic)

    @property
    def scope(self) -> str:
        return self.entry.scope if self.entry is not None else self.of or "program"
