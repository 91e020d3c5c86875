"""Build the form of a catalogue entry, and parse what was typed into it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

from diagnosis.causes import CAUSES, NONE, UNKNOWN
from diagnosis.signatures.entry import FIELDS, LISTS, Role, Scope
from diagnosis.signatures.operations import operations
from diagnosis.trial.checks import LONGEST, TrialFinding


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
        return LONGEST.get(self.name, 1000)


_ROLES = {
    "root": "may be the cause",
    "echo": "follows from something else",
    "confirmation": "supports its cause, alone it is nothing",
    "exit": "tells how a process ended",
    "handled": "what was said just before was survived",
    "completed": "the run came to its end",
}
_FIRST: tuple[dict[str, Any], ...] = (
    {"name": "name", "title": "Name", "hint": "Small letters, in parts with dots: storage.ours_down", "width": "half"},
    {"name": "source", "title": "Where the format comes from", "hint": "Software, version, file", "width": "half"},
    {
        "name": "pattern", "title": "Pattern", "kind": "line",
        "hint": "RE2, looked for on a line without its rank, time and level",
    },
    {"name": "example", "title": "A line that it finds", "kind": "line"},
    {"name": "look_alike", "title": "A line that only looks like it", "kind": "line", "hint": "It must not be found"},
    {"name": "role", "title": "What part the line plays", "kind": "choice", "width": "half"},
    {"name": "cause", "title": "Cause", "kind": "choice", "width": "half"},
    {"name": "advice", "title": "What to do", "kind": "area", "hint": "Empty: what the cause says by itself"},
)  # fmt: skip
_MORE: tuple[dict[str, Any], ...] = (
    {"name": "unless", "title": "Unless the line has", "kind": "line", "hint": "Then it means something else"},
    {"name": "scope", "title": "Who says it", "kind": "choice", "width": "half"},
    {
        "name": "is_generic", "title": "Any other entry on the line knows better", "kind": "flag", "width": "half",
    },
    {
        "name": "exception", "title": "Class of an exception", "kind": "line",
        "hint": "Then it is about whole tracebacks, and the pattern is looked for in the message",
    },
    {"name": "frame", "title": "A frame of the traceback", "kind": "line", "hint": "Of its path:function"},
    {"name": "during", "title": "What was being done", "width": "half"},
    {"name": "frameworks", "title": "Frameworks whose words these are", "width": "half"},
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
