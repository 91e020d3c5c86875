"""A field of the submit form as it is drawn, and the fieldset that it stands in."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

NEAREST = re.compile(r"(?:Nearest that do|The nearest that does): ([\d,]+)(?: or ([\d,]+))?\.")
_HALF = {
    *("name", "project", "kind", "tags"),
    *("resources.nodes", "resources.gpus_per_node", "resources.ranks_per_node", "resources.time_limit"),
    "restart.max_restarts",
    "restart.in_place",
    "script.entry",
    "script.directory",
    "script.git",
    "script.ref",
    *("environment.python", "environment.conda", "environment.container", "environment.engine"),
}
_WIDE = {
    *(
        "notes",
        "after",
        "script.args",
        "script.env",
        "script.python",
        "resources.require_nodes",
        "resources.exclude_nodes",
    ),
    *("environment.env", "environment.mounts", "environment.modules"),
}


@dataclass(frozen=True, kw_only=True)
class Field:
    """One field as it is drawn. `value` is the text in its box, `default` what the spec has without it."""

    path: str
    title: str
    kind: str  # text | number | decimal | choice | words | hosts | lines | pairs | area
    value: str = ""
    default: str = ""
    hint: str = ""
    choices: tuple[str, ...] = ()
    known: tuple[str, ...] = ()  # offered while typing; others are taken, too
    problem: str = ""
    nearest: tuple[str, ...] = ()
    required: bool = False

    @property
    def id(self) -> str:
        return "f-" + self.path.replace(".", "-")

    @property
    def lead(self) -> str:
        """The problem up to the values that would do, which are buttons."""
        match = NEAREST.search(self.problem)
        return self.problem[: match.start(1)] if match else self.problem

    @property
    def width(self) -> str:
        return "wide" if self.path in _WIDE else "half" if self.path in _HALF else ""

    @property
    def changed(self) -> bool:
        return self.value != self.default


@dataclass
class Section:
    """A fieldset: what most people set, and the rest."""

    title: str
    fields: list[Field] = field(default_factory=list)
    more: list[Field] = field(default_factory=list)

    @property
    def all(self) -> list[Field]:
        return [*self.fields, *self.more]

    @property
    def summary(self) -> str:
        """What stands on the fold."""
        if len(self.more) == 1:
            return self.more[0].title
        if not self.fields:
            return ", ".join(f.title if n == 0 else _lower(f.title) for n, f in enumerate(self.more[:4])) + " …"
        return f"{len(self.more)} more settings"

    @property
    def open(self) -> bool:
        """Whether the rest must be seen: something in it is set or wrong."""
        return any(f.changed or f.problem for f in self.more)


def _lower(title: str) -> str:
    """As it stands within a sentence: "node features", but "QOS" and "LoRA rank"."""
    first = title.partition(" ")[0]
    return title if first[1:] != first[1:].lower() else title[:1].lower() + title[1:]
