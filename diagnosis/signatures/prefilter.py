"""Search a block for all patterns of a catalogue at once, then classify the lines that it finds."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import re2

from diagnosis.logs.prefixes import parse_prefix
from diagnosis.regex import options
from diagnosis.signatures.catalogue import Catalogue, LineEntries

CACHE_SIZE = 20_000  # classified lines of all logs
DIGITS = bytes.maketrans(b"123456789", b"000000000")
# Besides entries, lines that begin or end a traceback.
_STRUCTURE = (
    rb"Traceback \(most recent call",
    rb"[a-z\d_](?:Error|Exception|Interrupt|Failure|Failed|Timeout|Expired|Exit)(?:: |$)",
    rb"Exit: |OutOfMemoryError|Root Cause \(first",
    rb"most recent call first\)",
)


@dataclass(frozen=True, slots=True)
class LineKind:
    """The classification shared by all lines that differ only in digits."""

    entries: LineEntries
    is_anchored: bool  # some digit-dependent entries match at the start of its words
    is_structure: bool
    is_relevant: bool


class Prefilter:
    """An automaton that finds every candidate line of a catalogue. It finds too many; `kind_of` narrows them down."""

    def __init__(self, catalogue: Catalogue) -> None:
        self.catalogue = catalogue
        self.cache: dict[bytes, LineKind] = {}
        structure = b"|".join(b"(?:(?m)" + pattern + b")" for pattern in _STRUCTURE)
        self._structure = re2.compile(structure, options(never_capture=True))
        self.search = re2.compile(
            b"|".join([*catalogue.prefilter_parts, structure]), options(never_capture=True)
        ).search

    def kind_of(self, line: bytes) -> LineKind:
        """Classify a new line, and with it all lines that differ from it in digits only."""
        if len(self.cache) >= CACHE_SIZE:
            self.cache.clear()
        found = self.cache[line.translate(DIGITS)] = self._classify(line)
        return found

    def _classify(self, line: bytes) -> LineKind:
        named = self.catalogue.line_entries(without_prefixes(line))
        is_structure = self._structure.search(line) is not None
        is_anchored = any("^" in entry.pattern for entry in named.digit_dependent)
        return LineKind(named, is_anchored, is_structure, bool(named.entries or named.digit_dependent or is_structure))


@lru_cache(maxsize=4)
def prefilter_of(catalogue: Catalogue) -> Prefilter:
    return Prefilter(catalogue)


def without_prefixes(line: bytes) -> bytes:
    """Return the line without its prefixes."""
    text = line.decode(errors="replace")
    return text[parse_prefix(text).length :].encode()
