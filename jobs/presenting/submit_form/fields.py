"""Fields of the submit form, and the fieldsets that group them."""

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
class FormField:
    """A field of the form. `value` is the text in its box, `default` the value that the spec has without it."""

    path: str
    title: str
    kind: str  # text | number | decimal | choice | words | hosts | lines | pairs | area
    value: str = ""
    default: str = ""
    hint: str = ""
    choices: tuple[str, ...] = ()
    suggestions: tuple[str, ...] = ()  # suggested while typing; other values are accepted too
    problem: str = ""
    nearest: tuple[str, ...] = ()
    required: bool = False

    @property
    def id(self) -> str:
        return "f-" + self.path.replace(".", "-")

    @property
    def lead(self) -> str:
        """Return the problem up to the suggested values, which the page shows as buttons."""
        match = NEAREST.search(self.problem)
        return self.problem[: match.start(1)] if match else self.problem

    @property
    def width(self) -> str:
        return "wide" if self.path in _WIDE else "half" if self.path in _HALF else ""

    @property
    def changed(self) -> bool:
        return self.value != self.default


@dataclass
class FormSection:
    """A fieldset: common fields, and the rest behind a fold."""

    title: str
    fields: list[FormField] = field(default_factory=list)
    more: list[FormField] = field(default_factory=list)
    takes_code: bool = False  # uploaded with the spec

    @property
    def all(self) -> list[FormField]:
        return [*self.fields, *self.more]

    @property
    def shown(self) -> list[FormField]:
        """Return the fields before the fold, including other fields that are set or invalid."""
        return [*self.fields, *self.unusual]

    @property
    def unusual(self) -> list[FormField]:
        return [f for f in self.more if f.changed or f.problem]

    @property
    def folded(self) -> list[FormField]:
        return [f for f in self.more if not (f.changed or f.problem)]

    @property
    def summary(self) -> str:
        """Return the label of the fold."""
        rest = self.folded
        if len(rest) == 1:
            return rest[0].title
        if not self.shown:
            return ", ".join(f.title if n == 0 else _lower(f.title) for n, f in enumerate(rest[:4])) + " …"
        return f"{len(rest)} more settings"

    @property
    def is_default(self) -> bool:
        """Return whether nothing in the section differs from the defaults.

        The form of a cloned job folds such a section completely.
        """
        return not any(f.changed or f.problem for f in self.all)

    @property
    def default_summary(self) -> str:
        """Return the label of a completely folded section."""
        values = [f"{_lower(f.title)} {f.value}" for f in self.fields if f.value][:4]
        return f"Defaults: {', '.join(values)}" if values else "Defaults"


def _lower(title: str) -> str:
    """Return the title for use within a sentence: "node features", but "QOS" and "LoRA rank"."""
    first = title.partition(" ")[0]
    return title if first[1:] != first[1:].lower() else title[:1].lower() + title[1:]
