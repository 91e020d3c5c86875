"""Scan one log once from end to end: entries of the catalogue that match, tracebacks, and progress.

Blocks of lines go through the prefilter. A line that it finds is classified once for all lines that differ in digits
only. Around matching lines the log is read closely, line by line; in a long log only in a few blocks from its
beginning and its end, so that neither time nor memory grow with its size.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import re2

from diagnosis.logs import progress
from diagnosis.logs.prefixes import Prefix, parse_prefix
from diagnosis.logs.progress import StepMark
from diagnosis.logs.torchrun_summary import SummaryReader
from diagnosis.logs.tracebacks import TracebackReader
from diagnosis.regex import options
from diagnosis.scanned_log import HITS_STORED, EntryHits, Hit, ScannedLine, ScannedLog, Stream
from diagnosis.signatures.entry import Entry
from diagnosis.signatures.prefilter import DIGITS, Prefilter, without_prefixes

LINE_BYTES = 1024  # bytes stored around a match
CLOSE_READ_BYTES = 512 * 1024  # bytes of a log that is read closely from end to end
LINES_BEFORE, LINES_AFTER = 150, 60  # lines around a match that are read closely in a longer log
HEAD_BLOCKS, TAIL_BLOCKS = 16, 8  # blocks with matches, from both ends
STREAMS = 64  # further streams whose first line of an entry is stored …
STREAMS_WITHIN = 200  # … if it is among this many lines of that entry
FLOOD = 64  # matches in a block from which on it is split into lines at once
MAX_CLOSE_READS = 40  # matches of an entry around which the log is read closely, besides its end
MAX_STRUCTURES = 2_000  # tracebacks around which it is
SAMPLE_BYTES = 4096  # of the end of a block, to find steps
SAMPLED_MARKS = 3  # steps recorded from it
MAX_MARKS = 20_000
MAX_MATCHED_LINES = 200_000
MAX_STREAMS = 2_048

_ANSI = re2.compile(rb"\x1b\[[\d;?]*[A-Za-z]|\x1b\][^\x07\x1b]{0,500}(?:\x07|\x1b\\)|\x1b[()][A-Z0-9]", options())


@dataclass(slots=True)
class _Block:
    """Lines to be read closely at the end. `hit_lines` are the lines that match something; None reads all of them."""

    first: int
    data: bytes
    hit_lines: list[int] | None

    def lines(self) -> Iterator[tuple[int, bytes]]:
        lines = enumerate(self.data.split(b"\n"), self.first)
        if self.hit_lines is None:
            yield from lines
            return
        spans = iter(_spans(self.hit_lines))
        start, end = next(spans, (0, -1))
        for number, line in lines:
            if number > end:
                start, end = next(spans, (1 << 62, 1 << 62))
            if number >= start:
                yield number, line


def _spans(places: Iterable[int]) -> Iterator[tuple[int, int]]:
    """Yield (first, last) line of the stretches around these lines, merging those that touch."""
    start = end = -1
    for place in sorted(places):
        if start >= 0 and place - LINES_BEFORE <= end + 1:
            end = place + LINES_AFTER
            continue
        if start >= 0:
            yield start, end
        start, end = max(1, place - LINES_BEFORE), place + LINES_AFTER
    if start >= 0:
        yield start, end


class Scanner:
    """Scan one log, block by block: `feed` each block, then `finish`.

    `year` completes time stamps that name none.
    """

    def __init__(self, prefilter: Prefilter, name: str, *, year: int = 0) -> None:
        self._prefilter, self._year = prefilter, year
        self._line_kinds = prefilter.cache
        self.scanned = ScannedLog(name)
        self._whole: list[_Block] = []  # the whole log, while it is short
        self._head: list[_Block] = []
        self._tail: deque[_Block] = deque(maxlen=TAIL_BLOCKS)
        self._before = b""  # the end of the block before
        self._passed = 0
        self._levels: dict[Stream, str] = {}  # of each stream's last line
        self._matched_lines: set[int] = set()  # lines that an entry matches
        self._structures = 0
        self._places: list[int] = []  # lines of this block with an entry or a traceback

    def feed(self, block: bytes) -> None:
        """Scan the next block: whole lines, except where one line is longer than a block."""
        scanned = self.scanned
        first = scanned.lines + 1
        scanned.bytes += len(block)
        if b"\0" in block:  # databases refuse NUL, and no entry needs it
            block = block.replace(b"\0", b"")
        if b"\x1b" in block:
            block = _ANSI.sub(b"", block)
        if b"\r" in block:
            block = block.replace(b"\r\n", b"\n")
        self._places = []
        self._search(first, block)
        scanned.lines += block.count(b"\n")
        if scanned.bytes <= CLOSE_READ_BYTES:
            self._whole.append(_Block(first, block, self._places))
        else:
            places = self._places
            self._leave_whole_reading()
            self._places = places
            self._process(first, block)
        self._before = block[-LINES_BEFORE * 200 :]

    def _leave_whole_reading(self) -> None:
        """Switch to reading closely around hits only, because the log is too long to be read closely as a whole.

        The beginning, which has been read, is reduced to its hits as well.
        """
        begun, self._whole = self._whole, []
        for block in begun:
            self._places = block.hit_lines or []
            self._process(block.first, block.data)

    def _process(self, first: int, block: bytes) -> None:
        if len(self.scanned.marks) < MAX_MARKS:
            self._sample_progress(first, block)
        if self._places:
            self._store(first, block)

    def finish(self) -> ScannedLog:
        """Read the stored blocks closely and return what the log contains."""
        scanned = self.scanned
        self._head += [_Block(block.first, block.data, None) for block in self._whole]
        if self._before and not self._before.endswith(b"\n"):
            scanned.lines += 1
        if scanned.bytes > CLOSE_READ_BYTES and self._before:  # the end of a log is always read
            cut = self._before.find(b"\n") + 1
            data = self._before[cut:]
            first = scanned.lines - data.count(b"\n") + (data.endswith(b"\n"))
            self._tail.append(_Block(first, data, None))
        if self._passed:
            scanned.limits.append(f"{self._passed:,} blocks in the middle were searched, but not read line by line")
        for hits in scanned.entry_hits.values():
            hits.last = [self._hit(hits.entry, number, line) for number, line in hits.raw]
        self._read_stored_blocks()
        return scanned

    # Searching.

    def _search(self, first: int, block: bytes) -> None:
        at, number, counted, hit_count = 0, first, 0, 0
        search = self._prefilter.search
        while (hit := search(block, at)) is not None:
            hit_count += 1
            if hit_count > FLOOD:
                self._search_every_line(number + block.count(b"\n", counted, at), block[at:])
                return
            place = hit.start()
            start = block.rfind(b"\n", 0, place) + 1
            end = block.find(b"\n", place)
            end = len(block) if end < 0 else end
            number += block.count(b"\n", counted, start)
            counted = start
            self._identify(number, _excerpt_around(block, start, end, place))
            at = end + 1
            if at > len(block):
                return

    def _search_every_line(self, first: int, block: bytes) -> None:
        """Classify every line, which is faster where most lines match."""
        name = self._identify
        for number, line in enumerate(block.split(b"\n"), first):
            if line:
                name(number, line if len(line) <= LINE_BYTES else line[:LINE_BYTES])

    def _identify(self, number: int, line: bytes) -> None:
        kind = self._line_kinds.get(line.translate(DIGITS)) or self._prefilter.kind_of(line)
        if not kind.is_relevant:
            return
        entries = kind.entries.entries
        if kind.entries.digit_dependent:
            entries = (*entries, *kind.entries.matching_digits(without_prefixes(line) if kind.is_anchored else line))
        is_new = False
        for entry in entries:
            is_new |= self._count(entry, number, line) <= MAX_CLOSE_READS
        if entries and len(self._matched_lines) < MAX_MATCHED_LINES:
            self._matched_lines.add(number)
        if kind.is_structure:
            self._structures += 1
            is_new |= self._structures <= MAX_STRUCTURES
        if is_new:
            self._places.append(number)

    def _count(self, entry: Entry, number: int, line: bytes) -> int:
        """Count a matching line, store it if it is among the first or last, and return how many there are now."""
        hits = self.scanned.entry_hits.get(entry.name)
        if hits is None:
            hits = self.scanned.entry_hits[entry.name] = EntryHits(entry)
        hits.count += 1
        if len(hits.first) < HITS_STORED:
            hits.first.append(self._hit(entry, number, line))
            return hits.count
        if hits.count < STREAMS_WITHIN and len(hits.first) < HITS_STORED + STREAMS:
            hit = self._hit(entry, number, line)
            if all(earlier.prefix.stream != hit.prefix.stream for earlier in hits.first):
                hits.first.append(hit)
                return hits.count
        hits.raw.append((number, line))
        return hits.count

    def _hit(self, entry: Entry, number: int, line: bytes) -> Hit:
        text = line.decode(errors="replace")
        prefix = parse_prefix(text, year=self._year)
        groups: dict[str, str] = {}
        if "(?P<" in entry.pattern and (match := self._prefilter.catalogue.compiled(entry.pattern).search(line)):
            named = match.groupdict().items()
            groups = {key.decode(): value.decode(errors="replace") for key, value in named if value}
        return Hit(entry, number, text, prefix, groups)

    # Close reading.

    def _store(self, first: int, block: bytes) -> None:
        if self._places[0] - first < LINES_BEFORE and self._before:
            cut = self._before.find(b"\n") + 1
            before = self._before[cut:]
            first, block = first - before.count(b"\n"), before + block
        stored = _Block(first, block, self._places)
        if len(self._head) < HEAD_BLOCKS:
            self._head.append(stored)
            return
        if len(self._tail) == TAIL_BLOCKS:
            self._passed += 1
        self._tail.append(stored)

    def _sample_progress(self, first: int, block: bytes) -> None:
        """Record the step that the end of a block shows."""
        for offset in progress.find_steps(block, max(0, len(block) - SAMPLE_BYTES))[-SAMPLED_MARKS:]:
            start = block.rfind(b"\n", 0, offset) + 1
            end = block.find(b"\n", offset)
            text = block[max(start, end - 2 * LINE_BYTES) : end if end >= 0 else len(block)].decode(errors="replace")
            number = first + block.count(b"\n", 0, start)
            if (mark := progress.parse_step(number, text)) is not None:
                self.scanned.marks.append((mark, parse_prefix(text, year=self._year)))

    def _read_stored_blocks(self) -> None:
        scanned, after = self.scanned, -1
        readers: dict[Stream, TracebackReader] = {}
        prefixes: dict[int, Prefix] = {}
        summaries = SummaryReader()
        tail: deque[ScannedLine] = deque(maxlen=400)
        for block in (*self._head, *self._tail):
            for line in self._new_lines(block, after):
                if line.number > after + 1:
                    _collect_tracebacks(readers, scanned, prefixes)
                    readers = {}
                after = max(after, line.number)
                tail.append(line)
                self._read_line(line, readers, prefixes)
                summaries.feed(line.number, line.text[line.prefix.length :])
        _collect_tracebacks(readers, scanned, prefixes)
        scanned.tail, scanned.summaries = list(tail), summaries.found
        scanned.marks = sorted(
            {(mark.line, mark.step): (mark, prefix) for mark, prefix in scanned.marks}.values(), key=_line_of
        )

    def _new_lines(self, block: _Block, after: int) -> Iterator[ScannedLine]:
        """Yield the lines of a block that were not read before."""
        for number, raw in block.lines():
            if number <= after:
                continue
            # A progress bar redraws its line: what it shows last counts, and any words before it.
            for part in raw.split(b"\r")[-3:] if b"\r" in raw else (raw,):
                if part:
                    text = part[: 4 * LINE_BYTES].decode(errors="replace")
                    yield ScannedLine(number, text, parse_prefix(text, year=self._year))

    def _read_line(
        self, line: ScannedLine, readers: dict[Stream, TracebackReader], prefixes: dict[int, Prefix]
    ) -> None:
        scanned, prefix = self.scanned, line.prefix
        if prefix.stamp is not None:
            scanned.stamps.append((line.number, prefix.stamp))
        reader = readers.get(prefix.stream)
        if reader is None:
            if len(readers) > MAX_STREAMS:
                return
            reader = readers[prefix.stream] = TracebackReader()
        words = line.text[prefix.length :]
        is_new = prefix.stamp is not None or bool(prefix.level)
        was_open = reader.is_open
        mark = progress.parse_step(line.number, words) if not was_open else None
        if mark is not None:
            reader.end_message()
        if reader.feed(line.number, words, is_logged=is_new):
            prefixes.setdefault(line.number, prefix)
            if not was_open and reader.is_open and (level := self._levels.get(prefix.stream)):
                scanned.level_before[line.number] = level
        elif mark is not None:
            if len(scanned.marks) < MAX_MARKS:
                scanned.marks.append((mark, prefix))
        elif words.strip() and line.number not in self._matched_lines:
            scanned.ordinary_lines.setdefault(prefix.stream, []).append(line.number)
        if words.strip():
            self._levels[prefix.stream] = prefix.level


def _line_of(mark: tuple[StepMark, Prefix]) -> int:
    return mark[0].line


def _collect_tracebacks(
    readers: dict[Stream, TracebackReader], scanned: ScannedLog, prefixes: dict[int, Prefix]
) -> None:
    for reader in readers.values():
        for traceback in reader.finish():
            prefix = prefixes.get(traceback.line or traceback.first, Prefix())
            scanned.tracebacks.append((traceback, prefix))
            for link in traceback.chain:
                scanned.traceback_lines.update(range(link.first, link.line or link.last or link.first))
    prefixes.clear()


def _excerpt_around(block: bytes, start: int, end: int, at: int) -> bytes:
    """Return the line, or of a long line the part around the match."""
    if end - start <= LINE_BYTES:
        return block[start:end]
    if (line_start := block.rfind(b"\r", start, at) + 1) > start:
        start = line_start
    if (line_start := block.find(b"\r", at, end)) >= 0:
        end = line_start
    start = max(start, at - LINE_BYTES // 2)
    return block[start : min(end, start + LINE_BYTES)]


def scan(prefilter: Prefilter, name: str, blocks: Iterable[bytes], *, year: int = 0) -> ScannedLog:
    """Scan one log given in blocks of whole lines. `year` completes time stamps that name none."""
    scanner = Scanner(prefilter, name, year=year)
    for block in blocks:
        scanner.feed(block)
    return scanner.finish()
