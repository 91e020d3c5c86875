"""A specification as TOML text: read within bounds, and changed so that comments and order stay."""

from __future__ import annotations

from typing import Any

import tomlkit

from jobs.errors import SpecError
from jobs.spec.broken import explain
from vigil_core import bounded

MAX_BYTES = 64 * 1024


def read_toml(text: str) -> dict[str, Any]:
    """Return the tables of a TOML text, or raise SpecError with the line. What it may hold is bounded."""
    if len(text) > MAX_BYTES or len(text.encode("utf-8", "surrogatepass")) > MAX_BYTES:
        raise SpecError.at(
            "", f"The specification is larger than {MAX_BYTES // 1024} KB. Keep code and data out of it."
        )
    try:
        return bounded.toml(text)
    except bounded.TooComplex as error:
        raise SpecError.at("", str(error)) from None
    except (ValueError, RecursionError) as error:
        raise SpecError.at("", explain(text, error)) from None


def set_values(text: str, values: dict[str, Any]) -> str:
    """Changes some values of a text ({"run.steps": 400}); comments and order stay."""
    read_toml(text)  # says what is wrong in our words, and bounds what tomlkit is given
    document = tomlkit.parse(text)
    for path, value in values.items():
        *tables, key = path.split(".")
        place: Any = document
        for depth, name in enumerate(tables):
            place = place.setdefault(name, tomlkit.table())
            if not hasattr(place, "setdefault"):
                raise SpecError.at(".".join(tables[: depth + 1]), "This is a value, not a table.")
        place[key] = value
    return tomlkit.dumps(document)
