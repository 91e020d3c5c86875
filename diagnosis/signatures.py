"""The catalogue of what failures look like: entries are data (catalogue/*.toml), and this is their one reader.

An entry names a pattern, what it means and what part it plays. Two engines look for all patterns at once, both of RE2,
so that no log can make them slow: the *sieve*, one alternation, finds the lines of a block; the *filter* names every
entry on such a line. An entry with `exception` is about a whole traceback instead (diagnosis.tracebacks).
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from functools import cache, cached_property, lru_cache
from pathlib import Path
from typing import Any, Literal, get_args

import re2

from diagnosis.causes import CAUSES, NONE, UNKNOWN
from diagnosis.literals import Words, words_of
from vigil_core import bounded
from vigil_core.bounded import Bounds

HERE = Path(__file__).parent / "catalogue"
BOUNDS = Bounds(depth=4, items=20_000)  # of a file; our longest has a thousand
MEMORY = 64 << 20  # of the sieve and of the set, for the states that they build as they read

Role = Literal["root", "echo", "confirmation", "exit", "handled", "completed"]
Scope = Literal["program", "kernel", "slurm", "trainer"]


class BadEntry(ValueError):
    """An entry that can't be taken in, in a sentence for whoever wrote it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One thing that software says when something goes wrong, or when nothing does.

    `role`: a *root* may be the cause; an *echo* follows from something else, and `cause` is what it would be alone; a
    *confirmation* supports its cause and is never enough; an *exit* tells how a process ended (groups `rank`, `node`,
    `code`, `signal`); *handled*: what was said just before was survived; *completed*: the run came to its end.
    `is_generic`: any other entry on the line knows better. `unless`: the line means something else if it matches this.
    `exception`, `frame`, `during`: for tracebacks: patterns of the exception's class and of a frame's "path:function",
    and what was being done (operations.toml); `pattern` is then looked for in the exception's message.
    `frameworks`: what a site would not run if it ran none of these, so that the catalogue can be judged without them.
    `heading`: what happened, where the cause's own title says too little; only in the catalogue that ships.
    `is_site`: written by the sysadmins of this site, and no key of a file.
    """

    name: str
    role: Role
    cause: str
    source: str
    pattern: str = ""
    unless: str = ""
    exception: str = ""
    frame: str = ""
    during: tuple[str, ...] = ()
    scope: Scope = "program"
    is_generic: bool = False
    advice: str = ""
    frameworks: tuple[str, ...] = ()
    example: str = ""
    look_alike: str = ""
    heading: str = ""
    is_site: bool = False

    def __post_init__(self) -> None:
        if self.cause not in CAUSES:
            raise BadEntry(f"{self.name}: {self.cause!r} is no cause (diagnosis/causes.py)")
        if self.role not in get_args(Role):
            raise BadEntry(f"{self.name}: role is one of {', '.join(get_args(Role))}, not {self.role!r}")
        if self.scope not in get_args(Scope):
            raise BadEntry(f"{self.name}: scope is one of {', '.join(get_args(Scope))}, not {self.scope!r}")
        if not self.pattern and not self.exception:
            raise BadEntry(f"{self.name}: it needs a pattern, or the class of an exception")
        if self.role in {"root", "confirmation"} and self.cause in {UNKNOWN, NONE}:
            raise BadEntry(f"{self.name}: a {self.role} is of some cause")

    @property
    def reads_tracebacks(self) -> bool:
        return bool(self.exception)

    @property
    def patterns(self) -> dict[str, str]:
        """What it looks for, by the field that says so."""
        return {name: value for name in PATTERNS if (value := getattr(self, name))}


PATTERNS = ("pattern", "unless", "exception", "frame")
FIELDS = tuple(field.name for field in fields(Entry) if field.name not in {"heading", "is_site"})
SHIPPED_FIELDS = (*FIELDS, "heading")
LISTS = ("during", "frameworks")


def entry_of(raw: Mapping[str, Any], *, known: tuple[str, ...] = FIELDS, **defaults: Any) -> Entry:
    """An entry from its table in TOML; BadEntry where something in it is not what it should be."""
    values = {**defaults, **raw}
    name = values.get("name", "an entry")
    if odd := set(values) - set(known):
        raise BadEntry(f"{name}: {', '.join(sorted(odd))} is nothing that an entry has")
    for key in ("name", "role", "cause", "source"):
        if not isinstance(values.get(key), str) or not values[key]:
            raise BadEntry(f"{name}: it has no {key}")
    for key in LISTS:
        value = values.get(key, [])
        values[key] = (value,) if isinstance(value, str) else tuple(value) if isinstance(value, list | tuple) else value
    for key, value in values.items():
        _check_kind(name, key, value)
    return Entry(**values)


def _check_kind(name: str, key: str, value: object) -> None:
    if key in LISTS:
        if not isinstance(value, tuple) or not all(isinstance(one, str) for one in value):
            raise BadEntry(f"{name}: {key} is a list of words")
    elif key == "is_generic":
        if not isinstance(value, bool):
            raise BadEntry(f"{name}: {key} is true or false")
    elif not isinstance(value, str):
        raise BadEntry(f"{name}: {key} is text")


def read(text: str, **defaults: Any) -> list[Entry]:
    """Return the entries of one file: tables `[[entry]]`, before them what is the same for all.

    Raises tomllib.TOMLDecodeError where it is not TOML, and BadEntry for everything else that is wrong with it.
    """
    try:
        raw = bounded.toml(text, BOUNDS)
    except tomllib.TOMLDecodeError:
        raise
    except (ValueError, RecursionError) as error:  # out of bounds, or a number of thousands of digits
        raise BadEntry(str(error)) from None
    return _entries(raw, **defaults)


def _entries(raw: dict[str, Any], *, known: tuple[str, ...] = FIELDS, **defaults: Any) -> list[Entry]:
    entries = raw.pop("entry", [])
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise BadEntry("an entry is a table: [[entry]]")
    return [entry_of(entry, known=known, **{**defaults, **raw}) for entry in entries]


def options(**values: Any) -> re2.Options:
    made = re2.Options()
    made.max_mem, made.encoding, made.log_errors = MEMORY, re2.Options.Encoding.LATIN1, False
    made.never_nl = True
    for name, value in values.items():
        setattr(made, name, value)
    return made


_BOUND = re.compile(r"(?<!\\)\{(?P<least>[01]),(?P<most>\d+)\}")
BOUND = 8
_BEGIN = re.compile(r"(?:^|(?<=\|)|(?<=\())\^")  # of a line's own words, before which the sieve sees prefixes
_NAMED_GROUP = re.compile(r"(?<!\\)\(\?P<\w+>")  # two patterns may have groups of one name, and one alternation not
_TOKENS = re.compile(r"\\x[0-9a-fA-F]{2}|\\.|\{[\d,]+\}|\(\?P<\w+>|\[\^?\]?(?:\\.|[^\]\\])*\]|\d|.", re.DOTALL)
_DIGIT = re.compile(r"(?<![{,\d])\d(?![\d,]*\})")  # but in a count


def _has_any(words: Words, text: str) -> bool:
    low = text.lower()
    return any(word in (low if any_case else text) for word, any_case in words)


def unbounded(pattern: str) -> str:
    """The pattern without bounds of what may be between words: each would cost the engine as many states."""

    def free(bound: re.Match[str]) -> str:
        return bound[0] if int(bound["most"]) < BOUND else "*" if bound["least"] == "0" else "+"

    return _BOUND.sub(free, pattern)


@cache
def blinded(pattern: str) -> str:
    """The pattern with any digit for each of its digits, so that it matches a line whatever its numbers are."""

    def blind(token: re.Match[str]) -> str:
        text = token[0]
        if text.isdigit():
            return r"\d"
        if text.startswith("[") and re.search(r"\d", text) and "0-9" not in text:
            return f"{text[:-1]}\\d]" if not text.startswith("[^") else text
        return text

    return _TOKENS.sub(blind, pattern) if _DIGIT.search(pattern) else pattern


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
        apart = [one for one in self._lined if _DIGIT.search(one.pattern)]
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
        return _entries(tomllib.loads(path.read_text(encoding="utf-8")), known=SHIPPED_FIELDS)
    except tomllib.TOMLDecodeError as error:
        raise BadEntry(f"{path.name}: {error}") from None


@cache
def catalogue() -> Catalogue:
    """What ships with Vigil."""
    found: list[Entry] = []
    for path in sorted(HERE.glob("*.toml")):
        found += shipped(path)
    return Catalogue(replace(entry, advice=entry.advice or CAUSES[entry.cause].advice) for entry in found)


@lru_cache(maxsize=4)
def extended(more: tuple[Entry, ...]) -> Catalogue:
    """With the entries of a site, each in the place of one that ships under the same name."""
    if not more:
        return catalogue()
    names = {entry.name for entry in more}
    return Catalogue((*(entry for entry in catalogue() if entry.name not in names), *map(of_site, more)))


def of_site(entry: Entry) -> Entry:
    return replace(entry, advice=entry.advice or CAUSES[entry.cause].advice, is_site=True)
