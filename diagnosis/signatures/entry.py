"""An entry of the catalogue: one thing that software prints when something goes wrong, or when nothing does."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

from diagnosis.causes import CAUSES, NONE, UNKNOWN
from vigil_core import bounded
from vigil_core.bounded import Bounds

BOUNDS = Bounds(depth=4, items=20_000)  # of a file; our longest has a thousand

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
    return entries_of(raw, **defaults)


def entries_of(raw: dict[str, Any], *, known: tuple[str, ...] = FIELDS, **defaults: Any) -> list[Entry]:
    entries = raw.pop("entry", [])
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise BadEntry("an entry is a table: [[entry]]")
    return [entry_of(entry, known=known, **{**defaults, **raw}) for entry in entries]
