"""All patterns of a catalogue at once: an automaton that finds too much, and what names it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import re2

from diagnosis.logs.prefixes import prefix_of
from diagnosis.regex import options
from diagnosis.signatures.catalogue import Catalogue, Named

KNOWN = 20_000  # different lines remembered, of all logs
DIGITS = bytes.maketrans(b"123456789", b"000000000")
# What tells of structure, beside the entries: where a traceback begins, and where it ends.
_STRUCTURE = (
    rb"Traceback \(most recent call",
    rb"[a-z\d_](?:Error|Exception|Interrupt|Failure|Failed|Timeout|Expired|Exit)(?:: |$)",
    rb"Exit: |OutOfMemoryError|Root Cause \(first",
    rb"most recent call first\)",
)


@dataclass(frozen=True, slots=True)
class KnownLine:
    """What lines that differ in digits only have in common."""

    named: Named
    is_anchored: bool  # some entries that depend on its digits are of its own first words
    is_structure: bool
    is_telling: bool


class Sieve:
    """All that a catalogue looks for as one automaton, which finds too much, and what names it."""

    def __init__(self, catalogue: Catalogue) -> None:
        self.catalogue = catalogue
        self.known: dict[bytes, KnownLine] = {}
        structure = b"|".join(b"(?:(?m)" + pattern + b")" for pattern in _STRUCTURE)
        self._structure = re2.compile(structure, options(never_capture=True))
        self.search = re2.compile(b"|".join([*catalogue.sieve, structure]), options(never_capture=True)).search

    def named(self, line: bytes) -> KnownLine:
        """What a line is that is not known yet; from now on all that differ from it in digits only are."""
        if len(self.known) >= KNOWN:
            self.known.clear()
        found = self.known[line.translate(DIGITS)] = self._named(line)
        return found

    def _named(self, line: bytes) -> KnownLine:
        named = self.catalogue.named(own_words(line))
        is_structure = self._structure.search(line) is not None
        is_anchored = any("^" in entry.pattern for entry in named.maybe)
        return KnownLine(named, is_anchored, is_structure, bool(named.entries or named.maybe or is_structure))


@lru_cache(maxsize=4)
def sieve_of(catalogue: Catalogue) -> Sieve:
    return Sieve(catalogue)


def own_words(line: bytes) -> bytes:
    """The line without its prefixes."""
    text = line.decode(errors="replace")
    return text[prefix_of(text).length :].encode()
