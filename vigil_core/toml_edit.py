"""Change values of a TOML text so that its comments and its order stay."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tomlkit

from vigil_core import bounded


class NotATable(ValueError):
    """A dotted path leads through a value. `path` is that value's."""

    def __init__(self, path: str) -> None:
        self.path = path
        super().__init__(f"{path} is a value, not a table.")


def set_values(text: str, values: Mapping[str, Any]) -> str:
    """Return the text with the values at dotted paths set: {"run.steps": 400}.

    Raises ValueError (bounded.TooComplex, tomllib.TOMLDecodeError) if the text is not TOML within bounds, NotATable if
    a path leads through a value.
    """
    bounded.toml(text)  # bounds what tomlkit is given: it is quadratic in dotted keys
    document = tomlkit.parse(text)
    for path, value in values.items():
        *tables, key = path.split(".")
        table: Any = document
        for depth, name in enumerate(tables):
            table = table.setdefault(name, tomlkit.table())
            if not hasattr(table, "setdefault"):
                raise NotATable(".".join(tables[: depth + 1]))
        table[key] = value
    return tomlkit.dumps(document)
