"""Match lines against all entries of the catalogue (catalogue/*.toml) at once.

Two RE2 engines search for all patterns together, so that no log makes them slow: the *prefilter*, one alternation,
finds candidate lines in a block; the *filter* then names every entry that matches such a line. Entries with
`exception` match whole tracebacks instead (`diagnosis.logs.tracebacks`).
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
from diagnosis.regex import DIGIT, digit_agnostic, options, unbounded
from diagnosis.signatures.entry import SHIPPED_FIELDS, BadEntry, Entry, parse_entries
from diagnosis.signatures.required_words import Words, required_words

SHIPPED = Path(__file__).parents[1] / "catalogue"

_BEGIN = re.compile(
    r"(?:^|(?<=\|)|(?<=\())\^"
)  # anchors at the line's own words; the prefilter sees prefixes before them
_NAMED_GROUP = re.compile(r"(?<!\\)\(\?P<\w+>")  # patterns may share group names; an alternation may not


MAX_CLASSES = 10_000  # exception classes whose entries are cached


def _has_any(words: Words, text: str, lowered: str) -> bool:
    for word, any_case in words:  # noqa: SIM110  (`any` takes twice as long, for 150 entries on every new line)
        if word in (lowered if any_case else text):
            return True
    return False


def _search_set(entries: Iterable[Entry]) -> Any:
    """Compile few patterns for very many lines: the cheapest search there is."""
    made = re2.Set.SearchSet(options(max_mem=8 << 20))
    for entry in entries:
        made.Add(b"(?m)" + unbounded(entry.pattern).encode())
    made.Compile()
    return made


class _NoMatches:
    def Match(self, text: bytes) -> tuple[int, ...]:
        return ()


_NO_MATCHES = _NoMatches()


def _regex_filter(entries: list[Entry], loosen: Callable[[str], str] = unbounded) -> Any:
    """Compile all patterns together, each changed by `loosen`:

    RE2 looks for words that each needs first, then tries only patterns that have theirs.

    A set of RE2 would be three times as fast once its states are built, but building them for lines of every kind
    takes twenty times as long as all of this.
    """
    made = re2.Filter()
    each = options(max_mem=8 << 20, never_capture=True)
    for entry in entries:
        try:
            made.Add(b"(?m)" + loosen(entry.pattern).encode(), each)
        except re2.error as error:
            raise BadEntry(f"{entry.name}: {error}") from None
    if not entries:  # RE2 refuses to match an empty filter
        return _NO_MATCHES
    made.Compile()
    return made


@dataclass(frozen=True, slots=True)
class LineEntries:
    """The entries that match a line.

    Those in `digit_dependent` match only some of the lines that differ in digits only.
    """

    entries: tuple[Entry, ...]
    digit_dependent: tuple[Entry, ...]
    matcher: Any
    exclude: Callable[[list[Entry], bytes], list[Entry]]

    def matching_digits(self, words: bytes) -> list[Entry]:
        """Return the digit-dependent entries that match this line. `words`: the line without its prefixes."""
        found = self.matcher.Match(words)
        return self.exclude([self.digit_dependent[index] for index in found], words) if found else []


class Catalogue:
    """Entries compiled for searching. Raises BadEntry if two have the same name."""

    def __init__(self, entries: Iterable[Entry]) -> None:
        self.entries = tuple(entries)
        names: set[str] = set()
        for entry in self.entries:
            if entry.name in names:
                raise BadEntry(f"{entry.name}: two entries have this name")
            names.add(entry.name)
        self._line_entries = [entry for entry in self.entries if not entry.is_for_tracebacks]
        self.traceback_entries = [entry for entry in self.entries if entry.is_for_tracebacks]

    @cached_property
    def _digit_independent(self) -> list[Entry]:
        return [entry for entry in self._line_entries if not DIGIT.search(entry.pattern)]

    @cached_property
    def _digit_dependent(self) -> list[tuple[Entry, Words | None]]:
        """Return the entries that match only some of the lines that differ in digits, each with words it requires."""
        return [(entry, required_words(entry.pattern)) for entry in self._line_entries if DIGIT.search(entry.pattern)]

    @cached_property
    def _filter(self) -> Any:
        return _regex_filter(self._digit_independent)

    @cached_property
    def _with_words(self) -> list[tuple[int, Entry, Words]]:
        """Return (position, entry, words) of the digit-dependent entries that require words."""
        return [(at, entry, words) for at, (entry, words) in enumerate(self._digit_dependent) if words is not None]

    @cached_property
    def _without_words(self) -> list[tuple[int, Entry]]:
        return [(at, entry) for at, (entry, words) in enumerate(self._digit_dependent) if words is None]

    @cached_property
    def _without_words_filter(self) -> Any:
        """Compile those together: one search per line, not a hundred."""
        return _regex_filter([entry for _, entry in self._without_words], lambda text: unbounded(digit_agnostic(text)))

    @property
    def patterns(self) -> list[str]:
        """Return the patterns of all entries that match lines, without repeats."""
        return list(dict.fromkeys(entry.pattern for entry in self._line_entries))

    @cached_property
    def prefilter_parts(self) -> list[bytes]:
        """Return what a line must contain to be examined: words that patterns require, else the pattern itself."""
        words: set[tuple[str, bool]] = set()
        patterns: dict[str, None] = {}
        for entry in self._line_entries:
            if (required := required_words(entry.pattern)) is not None:
                words |= required
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
        """Return one pattern compiled by itself, to find its groups and its place on a line that matches."""
        if (found := self._compiled.get(pattern)) is None:
            found = self._compiled[pattern] = re2.compile(unbounded(pattern).encode(), options(max_mem=8 << 20))
        return found

    def line_entries(self, words: bytes) -> LineEntries:
        """Return the entries that match a line and all lines that differ from it in digits only.

        `words`: without prefixes.
        """
        found = [self._digit_independent[index] for index in self._filter.Match(words) or ()]
        text = words.decode(errors="replace")
        lowered = text.lower()
        placed = [self._without_words[index] for index in self._without_words_filter.Match(words) or ()]
        placed += [
            (at, entry)
            for at, entry, required in self._with_words
            if _has_any(required, text, lowered) and self.compiled(digit_agnostic(entry.pattern)).search(words)
        ]
        maybe = [entry for _, entry in sorted(placed, key=lambda pair: pair[0])]
        return LineEntries(
            tuple(self._without_excluded(found, words)), tuple(maybe), self._matcher(maybe), self._without_excluded
        )

    def traceback_entries_for(self, class_name: str, full_name: str) -> list[Entry]:
        """Return the entries for tracebacks whose `exception` matches a class, given without and with its module."""
        key = (class_name, full_name)
        if (found := self._by_class.get(key)) is None:
            if len(self._by_class) >= MAX_CLASSES:
                self._by_class.clear()
            found = [entry for entry in self.traceback_entries if self.matches_class(entry, class_name, full_name)]
            self._by_class[key] = found
        return found

    def matches_class(self, entry: Entry, class_name: str, full_name: str) -> bool:
        """Return whether an entry's `exception` matches a class, given without and with its module."""
        is_with_module = "." in entry.exception.replace(r"\.", "") and "\\." in entry.exception
        matches = self.compiled(entry.exception).fullmatch  # RE2's, as all that sites may write
        return bool(not is_with_module and matches(class_name.encode())) or bool(matches(full_name.encode()))

    @cached_property
    def _by_class(self) -> dict[tuple[str, str], list[Entry]]:
        return {}

    def _matcher(self, entries: list[Entry]) -> Any:
        key = tuple(entry.name for entry in entries)
        if (found := self._matchers.get(key)) is None:
            found = self._matchers[key] = _search_set(entries) if entries else _NO_MATCHES
        return found

    @cached_property
    def _matchers(self) -> dict[tuple[str, ...], Any]:
        return {}

    def entries_matching(self, words: bytes) -> list[Entry]:
        """Return all entries that match a line. `words`: the line without its prefixes."""
        named = self.line_entries(words)
        return [*named.entries, *named.matching_digits(words)]

    def _without_excluded(self, entries: list[Entry], words: bytes) -> list[Entry]:
        return [entry for entry in entries if not entry.unless or not self.compiled(entry.unless).search(words)]

    def without_framework(self, framework: str) -> Catalogue:
        """Return the catalogue without a framework's entries, as for a site that has never seen it."""
        return Catalogue(entry for entry in self.entries if framework not in entry.frameworks)

    def frameworks(self) -> list[str]:
        return sorted({name for entry in self.entries for name in entry.frameworks})

    def __iter__(self) -> Iterator[Entry]:
        return iter(self.entries)


def read_shipped_file(path: Path) -> list[Entry]:
    """Return the entries of one of the catalogue's own files. Raises BadEntry if something in it is wrong."""
    try:
        return parse_entries(tomllib.loads(path.read_text(encoding="utf-8")), allowed=SHIPPED_FIELDS)
    except tomllib.TOMLDecodeError as error:
        raise BadEntry(f"{path.name}: {error}") from None


@cache
def shipped_catalogue() -> Catalogue:
    """Return the catalogue that ships with Vigil."""
    found: list[Entry] = []
    for path in sorted(SHIPPED.glob("*.toml")):
        found += read_shipped_file(path)
    return Catalogue(replace(entry, advice=entry.advice or CAUSES[entry.cause].advice) for entry in found)


@lru_cache(maxsize=4)
def extended_catalogue(more: tuple[Entry, ...]) -> Catalogue:
    """Return the shipped catalogue with a site's entries, each replacing a shipped one of the same name."""
    if not more:
        return shipped_catalogue()
    names = {entry.name for entry in more}
    return Catalogue((*(entry for entry in shipped_catalogue() if entry.name not in names), *map(as_site_entry, more)))


def as_site_entry(entry: Entry) -> Entry:
    """Return the entry marked as the site's, with its cause's advice if it has none of its own."""
    return replace(entry, advice=entry.advice or CAUSES[entry.cause].advice, is_site=True)
