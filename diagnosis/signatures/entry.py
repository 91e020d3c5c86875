"""Define an entry of the catalogue: one thing that software prints when something goes wrong, or when nothing does."""

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
    """Raised for an invalid entry; the message tells its author why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A message that software prints when something goes wrong, or when nothing does.

    `role`: a *root* may be the cause; an *echo* follows from something else, and `cause` is what it would mean alone;
    a *confirmation* supports its cause and is never enough; an *exit* reports how a process ended (groups `rank`,
    `node`, `code`, `signal`); *handled*: what was printed just before was survived; *completed*: the run reached its
    end. `is_generic`: any other entry that matches the line is preferred. `unless`: the line means something else if
    it matches this. `exception`, `frame`, `during`: for tracebacks: patterns of the exception's class and of a frame's
    "path:function", and what the program was doing (operations.toml); `pattern` then applies to the exception's
    message. `frameworks`: a site that runs none of these would not need the entry; the catalogue can be scored without
    them. `heading`: what happened, where the cause's own title says too little; only in the shipped catalogue.
    `is_site`: written by the sysadmins of this site; not a key of a file.
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
            raise BadEntry(f"{self.name}: {self.cause!r} is not a cause (diagnosis/causes.py)")
        if self.role not in get_args(Role):
            raise BadEntry(f"{self.name}: role must be one of {', '.join(get_args(Role))}, not {self.role!r}")
        if self.scope not in get_args(Scope):
            raise BadEntry(f"{self.name}: scope must be one of {', '.join(get_args(Scope))}, not {self.scope!r}")
        if not self.pattern and not self.exception:
            raise BadEntry(f"{self.name}: needs a pattern, or the class of an exception")
        if self.role in {"root", "confirmation"} and self.cause in {UNKNOWN, NONE}:
            raise BadEntry(f"{self.name}: a {self.role} needs a cause")

    @property
    def is_for_tracebacks(self) -> bool:
        return bool(self.exception)

    @property
    def patterns(self) -> dict[str, str]:
        """Return the entry's patterns by the field that has each."""
        return {name: value for name in PATTERNS if (value := getattr(self, name))}


PATTERNS = ("pattern", "unless", "exception", "frame")
FIELDS = tuple(field.name for field in fields(Entry) if field.name not in {"heading", "is_site"})
SHIPPED_FIELDS = (*FIELDS, "heading")
LISTS = ("during", "frameworks")


def parse_entry(raw: Mapping[str, Any], *, allowed: tuple[str, ...] = FIELDS, **defaults: Any) -> Entry:
    """Return an entry from its TOML table. Raises BadEntry if a field is unknown, missing or of the wrong type."""
    values = {**defaults, **raw}
    name = values.get("name", "an entry")
    if unknown := set(values) - set(allowed):
        raise BadEntry(f"{name}: {', '.join(sorted(unknown))} is not a field of an entry")
    for key in ("name", "role", "cause", "source"):
        if not isinstance(values.get(key), str) or not values[key]:
            raise BadEntry(f"{name}: {key} is missing")
    for key in LISTS:
        value = values.get(key, [])
        values[key] = (value,) if isinstance(value, str) else tuple(value) if isinstance(value, list | tuple) else value
    for key, value in values.items():
        _check_type(name, key, value)
    return Entry(**values)


def _check_type(name: str, key: str, value: object) -> None:
    if key in LISTS:
        if not isinstance(value, tuple) or not all(isinstance(item, str) for item in value):
            raise BadEntry(f"{name}: {key} must be a list of words")
    elif key == "is_generic":
        if not isinstance(value, bool):
            raise BadEntry(f"{name}: {key} must be true or false")
    elif not isinstance(value, str):
        raise BadEntry(f"{name}: {key} must be text")


def read_entries(text: str, **defaults: Any) -> list[Entry]:
    """Return the entries of one file: tables `[[entry]]`, preceded by values that all of them share.

    Raises tomllib.TOMLDecodeError if it is not TOML, and BadEntry for everything else that is wrong with it.
    """
    try:
        raw = bounded.toml(text, BOUNDS)
    except tomllib.TOMLDecodeError:
        raise
    except (ValueError, RecursionError) as error:  # out of bounds, or a number of thousands of digits
        raise BadEntry(str(error)) from None
    return parse_entries(raw, **defaults)


def parse_entries(raw: dict[str, Any], *, allowed: tuple[str, ...] = FIELDS, **defaults: Any) -> list[Entry]:
    """Return the entries of a decoded file. Raises BadEntry."""
    entries = raw.pop("entry", [])
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise BadEntry("an entry must be a table: [[entry]]")
    return [parse_entry(entry, allowed=allowed, **{**defaults, **raw}) for entry in entries]
