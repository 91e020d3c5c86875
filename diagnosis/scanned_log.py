"""What one log said: lines that entries name, tracebacks, steps, and what stood around them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from diagnosis.logs.json_records import Expansions
from diagnosis.logs.prefixes import Prefix
from diagnosis.logs.progress import Mark
from diagnosis.logs.torchrun_summary import Summary
from diagnosis.logs.tracebacks import Traceback
from diagnosis.signatures.entry import Entry

KEPT = 5  # first and last lines of an entry in one log
Stream = tuple[int | None, int | None, str]
"""Whose words: rank, rank on its node, node."""


@dataclass(slots=True)
class Hit:
    """A line that an entry matches. `line` counts as `grep -n` does."""

    entry: Entry
    line: int
    text: str
    prefix: Prefix
    groups: dict[str, str] = field(default_factory=dict)


@dataclass(slots=True)
class Told:
    """What one entry said in one log: the first and last lines, whose they were, and how many in all."""

    entry: Entry
    count: int = 0
    first: list[Hit] = field(default_factory=list)
    raw: deque[tuple[int, bytes]] = field(default_factory=lambda: deque(maxlen=KEPT))  # the last, not read yet
    last: list[Hit] = field(default_factory=list)

    @property
    def hits(self) -> list[Hit]:
        known = {hit.line for hit in self.first}
        return self.first + [hit for hit in self.last if hit.line not in known]


@dataclass(frozen=True, slots=True)
class Line:
    """One line read closely: its place, its own words, and what stood before them."""

    number: int
    text: str
    prefix: Prefix


@dataclass(slots=True)
class Scanned:
    """What one log said."""

    name: str
    told: dict[str, Told] = field(default_factory=dict)
    tracebacks: list[tuple[Traceback, Prefix]] = field(default_factory=list)
    marks: list[tuple[Mark, Prefix]] = field(default_factory=list)
    within: set[int] = field(default_factory=set)  # lines of tracebacks but for what they raised
    ordinary: dict[Stream, list[int]] = field(default_factory=dict)  # lines read closely that say nothing of this kind
    before: dict[int, str] = field(default_factory=dict)  # level of the line before a traceback's first
    summaries: list[Summary] = field(default_factory=list)
    lines: int = 0
    bytes: int = 0
    stamps: list[tuple[int, float]] = field(default_factory=list)  # of lines read closely
    tail: list[Line] = field(default_factory=list)
    limits: list[str] = field(default_factory=list)
    kind: str = "log"
    expansions: Expansions = field(default_factory=Expansions)  # from its lines, as they were read, to the log's own
    is_of_job: bool = False
    """Whether a job wrote it, which may print whatever it likes: nothing in it is the word of a kernel."""
    is_of_folder: bool = False
    """Whether the launcher copied it into the job's folder, where the job can replace it."""

    @property
    def hits(self) -> Iterator[Hit]:
        for told in self.told.values():
            yield from told.hits
