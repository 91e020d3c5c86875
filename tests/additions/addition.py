"""Describe an example of a thing that CONTRIBUTING.md says how to add, with a check that it is found and works.

The examples are in the modules beside this one; tests/test_contributing.py adds all of them to a copy of the tree.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple


class Edit(NamedTuple):
    """A change of a file: a text that occurs there once, and what is written instead; "" is the end of the file."""

    old: str
    new: str


@dataclass(frozen=True, kw_only=True)
class Addition:
    """An example of one item of the list."""

    thing: str
    """The name of the row, as CONTRIBUTING.md has it."""
    files: Mapping[str, str] = field(default_factory=dict)
    """New files by path."""
    edits: Mapping[str, Edit | Sequence[Edit]] = field(default_factory=dict)
    """Changes of existing files by path."""
    check: str
    """Python that fails unless the copy has it and it works."""
    guards: tuple[str, ...] = ()
    """Existing tests of this kind of thing."""

    @property
    def paths(self) -> set[str]:
        return {*self.files, *self.edits}

    def edits_of(self, path: str) -> list[Edit]:
        edits = self.edits[path]
        return [edits] if isinstance(edits, Edit) else [*edits]


def before(anchor: str, text: str) -> Edit:
    return Edit(anchor, text + anchor)


def after(anchor: str, text: str) -> Edit:
    return Edit(anchor, anchor + text)


def at_end(text: str) -> Edit:
    """Return the edit that appends a line to a document."""
    return Edit("", f"\n{text}\n")
