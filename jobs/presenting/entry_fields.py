"""Build the form of a catalogue entry, and parse what was typed into it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

from diagnosis.causes import CAUSES, NONE, UNKNOWN
from diagnosis.signatures.entry import FIELDS, LISTS, Role, Scope
from diagnosis.signatures.operations import operations
from diagnosis.trial.checks import MAX_LENGTHS, TrialFinding


@dataclass(frozen=True, kw_only=True)
class EntryField:
    """A field of the form."""

    name: str
    title: str
    hint: str = ""
    kind: str = "text"  # text | line | area | choice | flag
    width: str = "wide"
    choices: tuple[tuple[str, str], ...] = ()
    value: str = ""
    problems: tuple[str, ...] = ()

    @property
    def id(self) -> str:
        return f"entry-{self.name}"

    @property
    def most(self) -> int:
        return MAX_LENGTHS.get(self.name, 1000)


_ROLES = {
    "root": "may be the cause",
    "echo": "follows from something else",
    "confirmation": "supports a cause, but is none by itself",
    "exit": "says how a process ended",
    "handled": "the preceding error was survived",
    "completed": "the run completed",
}
_FIRST: tuple[dict[str, Any], ...] = (
    {"name": "name", "title": "Name", "hint": "Lower case, dotted: storage.ours_down", "width": "half"},
    {"name": "source", "title": "Where the format comes from", "hint": "Software, version, file", "width": "half"},
    {
        "name": "pattern", "title": "Pattern", "kind": "line",
        "hint": "RE2, matched against the line without rank, time and level",
    },
    {"name": "example", "title": "Matching line", "kind": "line"},
    {"name": "look_alike", "title": "Similar line", "kind": "line", "hint": "The pattern must not match it"},
    {"name": "role", "title": "Role of the line", "kind": "choice", "width": "half"},
    {"name": "cause", "title": "Cause", "kind": "choice", "width": "half"},
    {"name": "advice", "title": "What to do", "kind": "area", "hint": "Empty: the advice of the cause"},
)  # fmt: skip
_MORE: tuple[dict[str, Any], ...] = (
    {"name": "unless", "title": "Unless the line matches", "kind": "line", "hint": "Then it means something else"},
    {"name": "scope", "title": "Who prints it", "kind": "choice", "width": "half"},
    {
        "name": "is_generic", "title": "Any other matching entry takes precedence", "kind": "flag", "width": "half",
    },
    {
        "name": "exception", "title": "Exception class", "kind": "line",
        "hint": "For whole tracebacks; the pattern is then matched against the message",
    },
    {"name": "frame", "title": "Traceback frame", "kind": "line", "hint": "Matched against path:function"},
    {"name": "during", "title": "Operation", "width": "half"},
    {"name": "frameworks", "title": "Frameworks that print it", "width": "half"},
)  # fmt: skip


def fields(raw: Mapping[str, Any], findings: Sequence[TrialFinding]) -> tuple[list[EntryField], list[EntryField]]:
    """Return the fields that every entry needs, and the optional ones."""
    problems: dict[str, tuple[str, ...]] = {}
    for finding in findings:
        if finding.level == "error":
            problems[finding.field] = (*problems.get(finding.field, ()), finding.text)
    return [_entry_field(about, raw, problems) for about in _FIRST], [
        _entry_field(about, raw, problems) for about in _MORE
    ]


def _entry_field(
    about: Mapping[str, Any], raw: Mapping[str, Any], problems: Mapping[str, tuple[str, ...]]
) -> EntryField:
    name = about["name"]
    value = raw.get(name, "")
    text = " ".join(map(str, value)) if isinstance(value, list | tuple) else value
    shown = "1" if value is True else "" if not isinstance(text, str) else text
    more: dict[str, Any] = {"hint": _hint(name)} if name == "during" else {}
    return EntryField(
        **{**about, **more},
        value=shown,
        problems=problems.get(name, ()),
        choices=_choices(name, raw.get("role", "root")),
    )


def _hint(name: str) -> str:
    return f"Of {', '.join(sorted(operation.name for operation in operations()))}"


def _choices(name: str, role: object) -> tuple[tuple[str, str], ...]:
    if name == "role":
        return tuple((word, f"{word}: {_ROLES[word]}") for word in get_args(Role))
    if name == "scope":
        return tuple((word, word) for word in get_args(Scope))
    if name == "cause":
        causes = [cause for code, cause in CAUSES.items() if code not in {UNKNOWN, NONE}]
        return (*((cause.code, f"{cause.code}: {cause.title}") for cause in causes), (UNKNOWN, UNKNOWN), (NONE, NONE))
    return ()


def parse_entry(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entry's table from posted form data; empty fields are left out."""
    raw: dict[str, Any] = {}
    for name in FIELDS:
        text = str(given.get(name, "")).replace("\r\n", "\n")
        if name in LISTS:
            raw[name] = re.findall(r"[^\s,]+", text[:2_000])
        elif name == "is_generic":
            raw[name] = bool(text)
        elif text.strip():
            raw[name] = text if name in {"example", "look_alike", "pattern", "unless"} else text.strip()
    return {name: value for name, value in raw.items() if value}
