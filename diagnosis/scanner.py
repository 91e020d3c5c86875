"""One log, read once from end to end: what of the catalogue it says, its tracebacks, and how far it was.

Blocks of lines go through the sieve; lines that it finds are named once for all that differ in digits only. Around what
has a name the log is read closely, line by line: of a long one in a few blocks from its beginning and its end, so that
neither time nor memory follow its size.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import re2

from diagnosis.logs import progress
from diagnosis.logs.prefixes import Prefix, prefix_of
from diagnosis.logs.progress import Mark
from diagnosis.logs.torchrun_summary import SummaryReader
from diagnosis.logs.tracebacks import Reader
from diagnosis.regex import options
from diagnosis.scanned_log import KEPT, Hit, Line, Scanned, Stream, Told
from diagnosis.signatures.entry import Entry
from diagnosis.signatures.prefilter import DIGITS, Sieve, own_words

LINE = 1024  # bytes kept around what was found on a line
WHOLE = 512 * 1024  # bytes of a log that is read closely from end to end
BEFORE, AFTER = 150, 60  # lines around what was found that are read closely in a longer one
CLOSE_HEAD, CLOSE_TAIL = 16, 8  # blocks in which something was found, from both ends
STREAMS = 64  # whose first line of an entry is kept beside those …
STREAMS_WITHIN = 200  # … if it comes among so many of its lines
FLOOD = 64  # hits in one block from which on its lines are split at once
CLOSELY = 40  # lines of an entry around which the log is read closely; at its end it is in any case
STRUCTURES = 2_000  # and of tracebacks
PEEK = 4096  # of the end of a block: how far was it there
PEEKED = 3  # marks taken from there
MARKS = 20_000
MOST_TELLING = 200_000
MOST_STREAMS = 2_048

_ANSI = re2.compile(rb"\x1b\[[\d;?]*[A-Za-z]|\x1b\][^\x07\x1b]{0,500}(?:\x07|\x1b\\)|\x1b[()][A-Z0-9]", options())


@dataclass(slots=True)
class _Block:
    """Lines that are read closely at the end. `places`: where in them something was found; None: all of them count."""

    first: int
    data: bytes
    places: list[int] | None

    def lines(self) -> Iterator[tuple[int, bytes]]:
        lines = enumerate(self.data.split(b"\n"), self.first)
        if self.places is None:
            yield from lines
            return
        spans = iter(_spans(self.places))
        start, end = next(spans, (0, -1))
        for number, line in lines:
            if number > end:
                start, end = next(spans, (1 << 62, 1 << 62))
            if number >= start:
                yield number, line


def _spans(places: Iterable[int]) -> Iterator[tuple[int, int]]:
    """The stretches around these lines, those that touch as one."""
    start = end = -1
    for place in sorted(places):
        if start >= 0 and place - BEFORE <= end + 1:
            end = place + AFTER
            continue
        if start >= 0:
            yield start, end
        start, end = max(1, place - BEFORE), place + AFTER
    if start >= 0:
        yield start, end


class Scanner:
    """Reads one log, block by block."""

    def __init__(self, sieve: Sieve, name: str, *, year: int = 0) -> None:
        self._sieve, self._year = sieve, year
        self._known = sieve.known
        self.scanned = Scanned(name)
        self._whole: list[_Block] = []  # all of it, as long as it is short
        self._head: list[_Block] = []
        self._tail: deque[_Block] = deque(maxlen=CLOSE_TAIL)
        self._before = b""  # the end of the block before
        self._passed = 0
        self._levels: dict[Stream, str] = {}  # of each stream's last line
        self._telling: set[int] = set()  # lines that some entry names
        self._structures = 0
        self._places: list[int] = []  # of this block, where an entry or a structure was found

    def feed(self, block: bytes) -> None:
        """Some lines more, whole ones but where a line is longer than a block."""
        scanned = self.scanned
        first = scanned.lines + 1
        scanned.bytes += len(block)
        if b"\0" in block:  # no database takes it, and no line is told by it
            block = block.replace(b"\0", b"")
        if b"\x1b" in block:
            block = _ANSI.sub(b"", block)
        if b"\r" in block:
            block = block.replace(b"\r\n", b"\n")
        self._places = []
        self._sift(first, block)
        scanned.lines += block.count(b"\n")
        if scanned.bytes <= WHOLE:
            self._whole.append(_Block(first, block, self._places))
        else:
            places = self._places
            self._go_on()
            self._places = places
            self._add(first, block)
        self._before = block[-BEFORE * 200 :]

    def _go_on(self) -> None:
        """It is longer than what is read closely as a whole: of its beginning, too, only what has something in it."""
        begun, self._whole = self._whole, []
        for block in begun:
            self._places = block.places or []
            self._add(block.first, block.data)

    def _add(self, first: int, block: bytes) -> None:
        if len(self.scanned.marks) < MARKS:
            self._peek(first, block)
        if self._places:
            self._keep(first, block)

    def finish(self) -> Scanned:
        scanned = self.scanned
        self._head += [_Block(block.first, block.data, None) for block in self._whole]
        if self._before and not self._before.endswith(b"\n"):
            scanned.lines += 1
        if scanned.bytes > WHOLE and self._before:  # how it ends is of interest whatever it says there
            cut = self._before.find(b"\n") + 1
            data = self._before[cut:]
            first = scanned.lines - data.count(b"\n") + (data.endswith(b"\n"))
            self._tail.append(_Block(first, data, None))
        if self._passed:
            scanned.limits.append(f"{self._passed:,} blocks in its middle were searched, but not read line by line")
        for told in scanned.told.values():
            told.last = [self._hit(told.entry, number, line) for number, line in told.raw]
        self._read_closely()
        return scanned

    # The sieve.

    def _sift(self, first: int, block: bytes) -> None:
        at, number, counted, found = 0, first, 0, 0
        search = self._sieve.search
        while (hit := search(block, at)) is not None:
            found += 1
            if found > FLOOD:
                self._sift_all(number + block.count(b"\n", counted, at), block[at:])
                return
            place = hit.start()
            start = block.rfind(b"\n", 0, place) + 1
            end = block.find(b"\n", place)
            end = len(block) if end < 0 else end
            number += block.count(b"\n", counted, start)
            counted = start
            self._name(number, _around(block, start, end, place))
            at = end + 1
            if at > len(block):
                return

    def _sift_all(self, first: int, block: bytes) -> None:
        """Where most lines have something: without looking for each one's place."""
        name = self._name
        for number, line in enumerate(block.split(b"\n"), first):
            if line:
                name(number, line if len(line) <= LINE else line[:LINE])

    def _name(self, number: int, line: bytes) -> None:
        known = self._known.get(line.translate(DIGITS)) or self._sieve.named(line)
        if not known.is_telling:
            return
        entries = known.named.entries
        if known.named.maybe:
            entries = (*entries, *known.named.by_digits(own_words(line) if known.is_anchored else line))
        is_new = False
        for entry in entries:
            is_new |= self._note(entry, number, line) <= CLOSELY
        if entries and len(self._telling) < MOST_TELLING:
            self._telling.add(number)
        if known.is_structure:
            self._structures += 1
            is_new |= self._structures <= STRUCTURES
        if is_new:
            self._places.append(number)

    def _note(self, entry: Entry, number: int, line: bytes) -> int:
        """Count it, and keep it if it is one of the first or the last; how many there are now."""
        told = self.scanned.told.get(entry.name)
        if told is None:
            told = self.scanned.told[entry.name] = Told(entry)
        told.count += 1
        if len(told.first) < KEPT:
            told.first.append(self._hit(entry, number, line))
            return told.count
        if told.count < STREAMS_WITHIN and len(told.first) < KEPT + STREAMS:
            hit = self._hit(entry, number, line)
            if all(one.prefix.stream != hit.prefix.stream for one in told.first):
                told.first.append(hit)
                return told.count
        told.raw.append((number, line))
        return told.count

    def _hit(self, entry: Entry, number: int, line: bytes) -> Hit:
        text = line.decode(errors="replace")
        prefix = prefix_of(text, year=self._year)
        groups: dict[str, str] = {}
        if "(?P<" in entry.pattern and (match := self._sieve.catalogue.compiled(entry.pattern).search(line)):
            named = match.groupdict().items()
            groups = {key.decode(): value.decode(errors="replace") for key, value in named if value}
        return Hit(entry, number, text, prefix, groups)

    # Close reading.

    def _keep(self, first: int, block: bytes) -> None:
        if self._places[0] - first < BEFORE and self._before:
            cut = self._before.find(b"\n") + 1
            before = self._before[cut:]
            first, block = first - before.count(b"\n"), before + block
        kept = _Block(first, block, self._places)
        if len(self._head) < CLOSE_HEAD:
            self._head.append(kept)
            return
        if len(self._tail) == CLOSE_TAIL:
            self._passed += 1
        self._tail.append(kept)

    def _peek(self, first: int, block: bytes) -> None:
        """How far it was at the end of a block."""
        for offset in progress.find(block, max(0, len(block) - PEEK))[-PEEKED:]:
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
        for block in (*self._head, *self._tail):
            for line in self._lines(block, after):
                if line.number > after + 1:
                    _collect(readers, scanned, own)
                    readers = {}
                after = max(after, line.number)
                tail.append(line)
                self._closely(line, readers, own)
                summaries.feed(line.number, line.text[line.prefix.length :])
        _collect(readers, scanned, own)
        scanned.tail, scanned.summaries = list(tail), summaries.found
        scanned.marks = sorted(
            {(mark.line, mark.step): (mark, prefix) for mark, prefix in scanned.marks}.values(), key=_line_of
        )

    def _lines(self, block: _Block, after: int) -> Iterator[Line]:
        """The lines to be read, but for those before that have been."""
        for number, raw in block.lines():
            if number <= after:
                continue
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


def _line_of(mark: tuple[Mark, Prefix]) -> int:
    return mark[0].line


def _collect(readers: dict[Stream, Reader], scanned: Scanned, own: dict[int, Prefix]) -> None:
    for reader in readers.values():
        for traceback in reader.finish():
            prefix = own.get(traceback.line or traceback.first, Prefix())
            scanned.tracebacks.append((traceback, prefix))
            for one in traceback.chain:
                scanned.within.update(range(one.first, one.line or one.last or one.first))
    own.clear()


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
