"""Define the result of scanning one log: matching lines, tracebacks, steps, and the lines around them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from diagnosis.logs.json_records import LineExpansions
from diagnosis.logs.prefixes import Prefix
from diagnosis.logs.progress import StepMark
from diagnosis.logs.torchrun_summary import TorchrunSummary
from diagnosis.logs.tracebacks import Traceback
from diagnosis.signatures.entry import Entry

HITS_STORED = 5  # first and last lines of an entry in one log
Stream = tuple[int | None, int | None, str]
"""The source of a line: rank, local rank, node."""


@dataclass(slots=True)
class Hit:
    """A line that an entry matches. `line` counts from 1, as `grep -n` does."""

    entry: Entry
    line: int
    text: str
    prefix: Prefix
    groups: dict[str, str] = field(default_factory=dict)


@dataclass(slots=True)
class EntryHits:
    """The lines of one log that one entry matches: the first and the last of them, and how many there are."""

    entry: Entry
    count: int = 0
    first: list[Hit] = field(default_factory=list)
    raw: deque[tuple[int, bytes]] = field(default_factory=lambda: deque(maxlen=HITS_STORED))  # the last, not read yet
    last: list[Hit] = field(default_factory=list)

    @property
    def hits(self) -> list[Hit]:
        first_lines = {hit.line for hit in self.first}
        return self.first + [hit for hit in self.last if hit.line not in first_lines]


@dataclass(frozen=True, slots=True)
class ScannedLine:
    """A line that was read closely: its number, its text, and the prefix before the program's own words."""

    number: int
    text: str
    prefix: Prefix


@dataclass(slots=True)
class ScannedLog:
    """Everything that the diagnosis needs of one log. Line numbers count from 1; stamps are Unix seconds."""

    name: str
    entry_hits: dict[str, EntryHits] = field(default_factory=dict)
    tracebacks: list[tuple[Traceback, Prefix]] = field(default_factory=list)
    marks: list[tuple[StepMark, Prefix]] = field(default_factory=list)
    traceback_lines: set[int] = field(default_factory=set)  # lines of tracebacks but for what they raised
    ordinary_lines: dict[Stream, list[int]] = field(
        default_factory=dict
    )  # lines read closely that say nothing of this kind
    level_before: dict[int, str] = field(default_factory=dict)  # level of the line before a traceback's first
    summaries: list[TorchrunSummary] = field(default_factory=list)
    lines: int = 0
    bytes: int = 0
    stamps: list[tuple[int, float]] = field(default_factory=list)  # of lines read closely
    tail: list[ScannedLine] = field(default_factory=list)
    limits: list[str] = field(default_factory=list)
    kind: str = "log"
    expansions: LineExpansions = field(
        default_factory=LineExpansions
    )  # from its lines, as they were read, to the log's own
    is_from_job: bool = False
    """Whether a job wrote it, which may print anything, so kernel lines in it are not trusted."""
    is_from_job_folder: bool = False
    """Whether the launcher copied it into the job's folder, where the job can replace it."""

    @property
    def hits(self) -> Iterator[Hit]:
        for found in self.entry_hits.values():
            yield from found.hits
