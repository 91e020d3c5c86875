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
    *("client.entry", "client.algorithm", "client.directory", "client.git", "client.ref"),
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
    *("environment.env", "environment.mounts", "environment.modules", "restart.on"),
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
    takes_code: bool = False  # a file of it, sent beside the spec

    @property
    def all(self) -> list[Field]:
        return [*self.fields, *self.more]

    @property
    def shown(self) -> list[Field]:
        """What stands before the fold: also what of the rest is set or wrong, and that alone."""
        return [*self.fields, *self.unusual]

    @property
    def unusual(self) -> list[Field]:
        return [f for f in self.more if f.changed or f.problem]

    @property
    def folded(self) -> list[Field]:
        return [f for f in self.more if not (f.changed or f.problem)]

    @property
    def summary(self) -> str:
        """What stands on the fold."""
        rest = self.folded
        if len(rest) == 1:
            return rest[0].title
        if not self.shown:
            return ", ".join(f.title if n == 0 else _lower(f.title) for n, f in enumerate(rest[:4])) + " …"
        return f"{len(rest)} more settings"

    @property
    def as_usual(self) -> bool:
        """Nothing in it is set otherwise than by default, or wrong: a clone of a job folds it whole."""
        return not any(f.changed or f.problem for f in self.all)

    @property
    def usual(self) -> str:
        """What stands on the fold of such a section."""
        told = [f"{_lower(f.title)} {f.value}" for f in self.fields if f.value][:4]
        return f"As by default: {', '.join(told)}" if told else "As by default"


def _lower(title: str) -> str:
    """The title as it stands within a sentence: "node features", but "QOS" and "LoRA rank"."""
    first = title.partition(" ")[0]
    return title if first[1:] != first[1:].lower() else title[:1].lower() + title[1:]
