"""One log, read once from end to end: what of the catalogue it says, its tracebacks, and how far it was.

Blocks of lines go through the sieve; lines that it finds are named by the set, once for all that differ in digits only.
Blocks with such lines are kept to be read closely: at most `CLOSE_HEAD` from the beginning and `CLOSE_TAIL` from the end, so
that neither time nor memory follow the size of the log.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache

import re2

from jobs.postmortem import progress
from jobs.postmortem.prefixes import Prefix, prefix_of
from jobs.postmortem.progress import Mark
from jobs.postmortem.signatures import Catalogue, Entry, Named, options
from jobs.postmortem.summaries import Summary, SummaryReader
from jobs.postmortem.tracebacks import Reader, Traceback

BLOCK = 256 * 1024
LINE = 1024  # bytes kept around what was found on a line
CLOSE_HEAD, CLOSE_TAIL = 16, 8  # blocks with hits that are read line by line
KEPT = 5  # first and last lines of an entry in one log
STREAMS = 64  # whose first line of an entry is kept beside those
KNOWN = 20_000  # different lines remembered
FLOOD = 400  # hits in one block from which on its lines are split at once
PEEK = 4096  # of the end of a block without hits: how far was it there
MARKS = 20_000
MOST_TELLING = 200_000
MOST_STREAMS = 2_048

# What tells of structure, beside the entries: where a traceback begins, and where it ends.
_STRUCTURE = (
    rb"Traceback \(most recent call",
    rb"[a-z\d_](?:Error|Exception|Interrupt|Failure|Failed|Timeout|Expired|Exit)(?:: |$)",
    rb"Exit: |OutOfMemoryError|Root Cause \(first",
    rb"most recent call first\)",
)
Stream = tuple[int | None, int | None, str]

_DIGITS = bytes.maketrans(b"123456789", b"000000000")
_ANSI = re2.compile(rb"\x1b\[[\d;?]*[A-Za-z]|\x1b\][^\x07\x1b]{0,500}(?:\x07|\x1b\\)|\x1b[()][A-Z0-9]", options())


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
    last: deque[Hit] = field(default_factory=lambda: deque(maxlen=KEPT))

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

    @property
    def hits(self) -> Iterator[Hit]:
        for told in self.told.values():
            yield from told.hits


class Sieve:
    """All patterns of a catalogue as one alternation."""

    def __init__(self, catalogue: Catalogue) -> None:
        self.catalogue = catalogue
        parts = [*catalogue.sieve, *(b"(?:(?m)" + pattern + b")" for pattern in _STRUCTURE)]
        self._compiled = re2.compile(b"|".join(parts), options(never_capture=True))
        self.search = self._compiled.search


@lru_cache(maxsize=4)
def sieve_of(catalogue: Catalogue) -> Sieve:
    return Sieve(catalogue)


class Scanner:
    """Reads one log, block by block."""

    def __init__(self, sieve: Sieve, name: str, *, year: int = 0) -> None:
        self._sieve, self._year = sieve, year
        self.scanned = Scanned(name)
        self._known: dict[bytes, Named] = {}
        self._head: list[tuple[int, bytes]] = []
        self._tail: deque[tuple[int, bytes]] = deque(maxlen=CLOSE_TAIL)
        self._newest: tuple[int, bytes] | None = None
        self._passed = 0
        self._levels: dict[Stream, str] = {}  # of each stream's last line
        self._telling: set[int] = set()  # lines that some entry names

    def feed(self, block: bytes) -> None:
        """Some lines more, whole ones but where a line is longer than a block."""
        scanned = self.scanned
        first = scanned.lines + 1
        scanned.bytes += len(block)
        if b"\x1b" in block:
            block = _ANSI.sub(b"", block)
        if b"\r" in block:
            block = block.replace(b"\r\n", b"\n")
        has_hits = self._sift(first, block)
        scanned.lines += block.count(b"\n")
        if has_hits:
            self._keep((first, block))
        elif len(scanned.marks) < MARKS:
            self._peek(first, block)
        self._newest = (first, block)

    def finish(self) -> Scanned:
        scanned = self.scanned
        if self._newest is not None:
            newest = self._newest
            if not any(first == newest[0] for first, _ in (*self._head, *self._tail)):
                self._tail.append(newest)
            if not newest[1].endswith(b"\n") and newest[1]:
                scanned.lines += 1
        if self._passed:
            scanned.limits.append(f"{self._passed:,} blocks in its middle were searched, but not read line by line")
        self._read_closely()
        return scanned

    # The sieve.

    def _sift(self, first: int, block: bytes) -> bool:
        at, number, counted, found = 0, first, 0, 0
        search = self._sieve.search
        while (hit := search(block, at)) is not None:
            found += 1
            if found > FLOOD:
                self._sift_all(number + block.count(b"\n", counted, at), block[at:])
                return True
            start = block.rfind(b"\n", 0, hit.start()) + 1
            end = block.find(b"\n", hit.start())
            end = len(block) if end < 0 else end
            number += block.count(b"\n", counted, start)
            counted = start
            self._name(number, _around(block, start, end, hit.start()))
            at = end + 1
            if at > len(block):
                break
        return found > 0

    def _sift_all(self, first: int, block: bytes) -> None:
        """Where most lines have something: without looking for each one's place."""
        for number, line in enumerate(block.split(b"\n"), first):
            if line:
                self._name(number, line if len(line) <= LINE else line[:LINE])

    def _name(self, number: int, line: bytes) -> None:
        key = line.translate(_DIGITS)
        named = self._known.get(key)
        if named is None:
            if len(self._known) >= KNOWN:
                self._known.clear()
            named = self._known[key] = self._sieve.catalogue.named(_own(line))
        entries = named.entries
        if named.depends:
            entries = (*entries, *self._sieve.catalogue.by_digits(_own(line)))
        for entry in entries:
            self._note(entry, number, line)
        if entries and len(self._telling) < MOST_TELLING:
            self._telling.add(number)

    def _note(self, entry: Entry, number: int, line: bytes) -> None:
        told = self.scanned.told.get(entry.name)
        if told is None:
            told = self.scanned.told[entry.name] = Told(entry)
        told.count += 1
        if len(told.first) < KEPT + STREAMS:
            hit = self._hit(entry, number, line)
            if len(told.first) < KEPT or all(one.prefix.stream != hit.prefix.stream for one in told.first):
                told.first.append(hit)
                return
        elif told.count & 0xFF and told.count > 100_000:
            return  # of a flood, every 256th will do until its end, which is read closely
        told.last.append(self._hit(entry, number, line))

    def _hit(self, entry: Entry, number: int, line: bytes) -> Hit:
        text = line.decode(errors="replace")
        prefix = prefix_of(text, year=self._year)
        groups: dict[str, str] = {}
        if "(?P<" in entry.pattern and (match := self._sieve.catalogue.compiled(entry.pattern).search(line)):
            named = match.groupdict().items()
            groups = {key.decode(): value.decode(errors="replace") for key, value in named if value}
        return Hit(entry, number, text, prefix, groups)

    # Close reading.

    def _keep(self, block: tuple[int, bytes]) -> None:
        if len(self._head) < CLOSE_HEAD:
            self._head.append(block)
            return
        if len(self._tail) == CLOSE_TAIL:
            self._passed += 1
        self._tail.append(block)

    def _peek(self, first: int, block: bytes) -> None:
        """How far it was at the end of a block in which nothing happened."""
        start = max(0, len(block) - PEEK)
        offsets = progress.find(block, start)
        for offset in offsets[-2:]:
            self._mark(first, block, offset)

    def _mark(self, first: int, block: bytes, offset: int) -> None:
        start = block.rfind(b"\n", 0, offset) + 1
        end = block.find(b"\n", offset)
        text = block[max(start, end - 2 * LINE) : end if end >= 0 else len(block)].decode(errors="replace")
        number = first + block.count(b"\n", 0, start)
        if (mark := progress.read(number, text)) is not None:
            self.scanned.marks.append((mark, prefix_of(text, year=self._year)))

    def _read_closely(self) -> None:
        scanned, after = self.scanned, -1
        readers: dict[Stream, Reader] = {}
        own: dict[int, Prefix] = {}
        summaries = SummaryReader()
        tail: deque[Line] = deque(maxlen=400)
        for first, block in (*self._head, *self._tail):
            if first != after:
                _collect(readers, scanned, own)
                readers = {}
            for line in self._lines(first, block):
                tail.append(line)
                self._closely(line, readers, own)
                summaries.feed(line.number, line.text[line.prefix.length :])
            after = first + block.count(b"\n")
        _collect(readers, scanned, own)
        scanned.tail, scanned.summaries = list(tail), summaries.found
        scanned.marks.sort(key=lambda mark: mark[0].line)

    def _lines(self, first: int, block: bytes) -> Iterator[Line]:
        for number, raw in enumerate(block.split(b"\n"), first):
            # A progress bar draws over its line: what stands there in the end is what counts, and any words before it.
            for part in raw.split(b"\r")[-3:] if b"\r" in raw else (raw,):
                if part:
                    text = part[: 4 * LINE].decode(errors="replace")
                    yield Line(number, text, prefix_of(text, year=self._year))

    def _closely(self, line: Line, readers: dict[Stream, Reader], own: dict[int, Prefix]) -> None:
        scanned, prefix = self.scanned, line.prefix
        if prefix.stamp is not None:
            scanned.stamps.append((line.number, prefix.stamp))
        reader = readers.get(prefix.stream)
        if reader is None:
            if len(readers) > MOST_STREAMS:
                return
            reader = readers[prefix.stream] = Reader()
        words = line.text[prefix.length :]
        is_new = prefix.stamp is not None or bool(prefix.level)
        was_open = reader.is_open
        mark = progress.read(line.number, words) if not was_open else None
        if mark is not None:
            reader.end_message()
        if reader.feed(line.number, words, is_logged=is_new):
            own.setdefault(line.number, prefix)
            if not was_open and reader.is_open and (level := self._levels.get(prefix.stream)):
                scanned.before[line.number] = level
        elif mark is not None:
            if len(scanned.marks) < MARKS:
                scanned.marks.append((mark, prefix))
        elif words.strip() and line.number not in self._telling:
            scanned.ordinary.setdefault(prefix.stream, []).append(line.number)
        if words.strip():
            self._levels[prefix.stream] = prefix.level


def _collect(readers: dict[Stream, Reader], scanned: Scanned, own: dict[int, Prefix]) -> None:
    for reader in readers.values():
        for traceback in reader.finish():
            prefix = own.get(traceback.line or traceback.first, Prefix())
            scanned.tracebacks.append((traceback, prefix))
            for one in traceback.chain:
                scanned.within.update(range(one.first, one.line or one.last or one.first))
    own.clear()


def _own(line: bytes) -> bytes:
    text = line.decode(errors="replace")
    return text[prefix_of(text).length :].encode()


def _around(block: bytes, start: int, end: int, at: int) -> bytes:
    """The line, or of a long one what is around the place that was found."""
    if end - start <= LINE:
        return block[start:end]
    if (turned := block.rfind(b"\r", start, at) + 1) > start:
        start = turned
    if (turned := block.find(b"\r", at, end)) >= 0:
        end = turned
    start = max(start, at - LINE // 2)
    return block[start : min(end, start + LINE)]


def scan(sieve: Sieve, name: str, blocks: Iterable[bytes], *, year: int = 0) -> Scanned:
    """Read one log."""
    scanner = Scanner(sieve, name, year=year)
    for block in blocks:
        scanner.feed(block)
    return scanner.finish()
