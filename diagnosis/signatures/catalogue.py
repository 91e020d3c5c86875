"""The catalogue of what failures look like: entries are data (catalogue/*.toml), and this is their one reader.

An entry names a pattern, what it means and what part it plays. Two engines look for all patterns at once, both of RE2,
so that no log can make them slow: the *sieve*, one alternation, finds the lines of a block; the *filter* names every
entry on such a line. An entry with `exception` is about a whole traceback instead (diagnosis.logs.tracebacks).
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache, cached_property, lru_cache
from pathlib import Path
from typing import Any

import re2

from diagnosis.causes import CAUSES
from diagnosis.regex import DIGIT, blinded, options, unbounded
from diagnosis.signatures.entry import SHIPPED_FIELDS, BadEntry, Entry, entries_of
from diagnosis.signatures.required_words import Words, words_of

SHIPPED = Path(__file__).parents[1] / "catalogue"

_BEGIN = re.compile(r"(?:^|(?<=\|)|(?<=\())\^")  # of a line's own words, before which the sieve sees prefixes
_NAMED_GROUP = re.compile(r"(?<!\\)\(\?P<\w+>")  # two patterns may have groups of one name, and one alternation not


def _has_any(words: Words, text: str) -> bool:
    low = text.lower()
    return any(word in (low if any_case else text) for word, any_case in words)


def _set(entries: Iterable[Entry]) -> Any:
    """Few patterns at once, for one line of very many: the least that asking may cost."""
    made = re2.Set.SearchSet(options(max_mem=8 << 20))
    for entry in entries:
        made.Add(b"(?m)" + unbounded(entry.pattern).encode())
    made.Compile()
    return made


class _Nothing:
    def Match(self, text: bytes) -> tuple[int, ...]:
        return ()


_NOTHING = _Nothing()


def _filter(entries: list[Entry]) -> Any:
    """All patterns at once: words that each needs are looked for first, then only those that have theirs.

    A set of RE2 would be three times as fast once its states are built, but building them for lines of every kind takes
    twenty times as long as all of this.
    """
    made = re2.Filter()
    each = options(max_mem=8 << 20, never_capture=True)
    for entry in entries:
        try:
            made.Add(b"(?m)" + unbounded(entry.pattern).encode(), each)
        except re2.error as error:
            raise BadEntry(f"{entry.name}: {error}") from None
    if not entries:  # it would refuse to be asked
        return _NOTHING
    made.Compile()
    return made


@dataclass(frozen=True, slots=True)
class Named:
    """What lines that differ in digits only have in common; `maybe`: entries that depend on the digits."""

    entries: tuple[Entry, ...]
    maybe: tuple[Entry, ...]
    test: Any
    but: Callable[[list[Entry], bytes], list[Entry]]

    def by_digits(self, own: bytes) -> list[Entry]:
        """Of those that depend on the digits, the ones that this line's are of."""
        found = self.test.Match(own)
        return self.but([self.maybe[index] for index in found], own) if found else []


class Catalogue:
    """Entries, ready to be looked for."""

    def __init__(self, entries: Iterable[Entry]) -> None:
        self.entries = tuple(entries)
        seen: set[str] = set()
        for entry in self.entries:
            if entry.name in seen:
                raise BadEntry(f"{entry.name}: there are two of this name")
            seen.add(entry.name)
        self._lined = [entry for entry in self.entries if not entry.reads_tracebacks]
        self.of_tracebacks = [entry for entry in self.entries if entry.reads_tracebacks]

    @cached_property
    def _by_digits(self) -> tuple[list[Entry], list[tuple[Entry, Words | None]]]:
        """Entries that no digit tells apart, and those that one does, with words that they can't do without."""
        apart = [one for one in self._lined if DIGIT.search(one.pattern)]
        names = {one.name for one in apart}
        return [one for one in self._lined if one.name not in names], [(one, words_of(one.pattern)) for one in apart]

    @cached_property
    def _filter(self) -> Any:
        return _filter(self._by_digits[0])

    @property
    def patterns(self) -> list[str]:
        """Of all entries that are looked for on lines."""
        return list(dict.fromkeys(entry.pattern for entry in self._lined))

    @cached_property
    def sieve(self) -> list[bytes]:
        """What a line must have to be looked at: words that patterns can't do without, else the pattern itself."""
        words: set[tuple[str, bool]] = set()
        patterns: dict[str, None] = {}
        for entry in self._lined:
            if (found := words_of(entry.pattern)) is not None:
                words |= found
            else:
                patterns[_NAMED_GROUP.sub("(?:", unbounded(_BEGIN.sub("", entry.pattern)))] = None
        sensitive = [re2.escape(word.encode()) for word, any_case in sorted(words) if not any_case]
        insensitive = [re2.escape(word.encode()) for word, any_case in sorted(words) if any_case]
        parts = [b"(?:(?m)" + pattern.encode() + b")" for pattern in patterns]
        if insensitive:
            parts.append(b"(?i:" + b"|".join(insensitive) + b")")
        return [*sensitive, *parts]

    @cached_property
    def _compiled(self) -> dict[str, Any]:
        return {}

    def compiled(self, pattern: str) -> Any:
        """The pattern by itself, for its groups and its place on a line that is known to have it."""
        if (found := self._compiled.get(pattern)) is None:
            found = self._compiled[pattern] = re2.compile(unbounded(pattern).encode(), options(max_mem=8 << 20))
        return found

    def named(self, own: bytes) -> Named:
        """What a line, without its prefixes, and all that differ from it in digits only have in common."""
        alike, apart = self._by_digits
        found = [alike[index] for index in self._filter.Match(own) or ()]
        text = own.decode(errors="replace")
        near = [one for one, words in apart if words is None or _has_any(words, text)]
        maybe = [one for one in near if self.compiled(blinded(one.pattern)).search(own)]
        return Named(tuple(self._but(found, own)), tuple(maybe), self._test(maybe), self._but)

    def _test(self, entries: list[Entry]) -> Any:
        key = tuple(entry.name for entry in entries)
        if (found := self._tests.get(key)) is None:
            found = self._tests[key] = _set(entries) if entries else _NOTHING
        return found

    @cached_property
    def _tests(self) -> dict[tuple[str, ...], Any]:
        return {}

    def on(self, own: bytes) -> list[Entry]:
        """All entries that a line matches, the line without its prefixes."""
        named = self.named(own)
        return [*named.entries, *named.by_digits(own)]

    def _but(self, entries: list[Entry], own: bytes) -> list[Entry]:
        return [entry for entry in entries if not entry.unless or not self.compiled(entry.unless).search(own)]

    def without(self, framework: str) -> Catalogue:
        """The catalogue of a site where nobody has heard of a framework."""
        return Catalogue(entry for entry in self.entries if framework not in entry.frameworks)

    def frameworks(self) -> list[str]:
        return sorted({name for entry in self.entries for name in entry.frameworks})

    def __iter__(self) -> Iterator[Entry]:
        return iter(self.entries)


def shipped(path: Path) -> list[Entry]:
    """Return the entries of one of the catalogue's own files."""
    try:
        return entries_of(tomllib.loads(path.read_text(encoding="utf-8")), known=SHIPPED_FIELDS)
    except tomllib.TOMLDecodeError as error:
        raise BadEntry(f"{path.name}: {error}") from None


@cache
def shipped_catalogue() -> Catalogue:
    """What ships with Vigil."""
    found: list[Entry] = []
    for path in sorted(SHIPPED.glob("*.toml")):
        found += shipped(path)
    return Catalogue(replace(entry, advice=entry.advice or CAUSES[entry.cause].advice) for entry in found)


@lru_cache(maxsize=4)
def extended(more: tuple[Entry, ...]) -> Catalogue:
    """With the entries of a site, each in the place of one that ships under the same name."""
    if not more:
        return shipped_catalogue()
    names = {entry.name for entry in more}
    return Catalogue((*(entry for entry in shipped_catalogue() if entry.name not in names), *map(of_site, more)))


def of_site(entry: Entry) -> Entry:
    return replace(entry, advice=entry.advice or CAUSES[entry.cause].advice, is_site=True)
