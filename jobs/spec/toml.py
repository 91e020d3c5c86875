"""Read a specification's TOML within bounds, and change it so that comments and order stay."""

from __future__ import annotations

from typing import Any

from jobs.errors import SpecError
from jobs.spec.toml_errors import explain
from vigil_core import bounded, toml_edit

MAX_BYTES = 64 * 1024


def read_toml(text: str) -> dict[str, Any]:
    """Return the tables of a TOML text, or raise SpecError with the line. What it may hold is bounded."""
    if len(text) > MAX_BYTES or len(text.encode("utf-8", "surrogatepass")) > MAX_BYTES:
        raise SpecError.at("", f"The specification is larger than {MAX_BYTES // 1024} KB. Leave out code and data.")
    try:
        return bounded.toml(text)
    except bounded.TooComplex as error:
        raise SpecError.at("", str(error)) from None
    except (ValueError, RecursionError) as error:
        raise SpecError.at("", explain(text, error)) from None


def set_values(text: str, values: dict[str, Any]) -> str:
    """Return the text with some values set ({"run.steps": 400}); comments and order stay. Raises SpecError."""
    read_toml(text)  # an error in the text is explained with its line
    try:
        return toml_edit.set_values(text, values)
    except toml_edit.NotATable as error:
        raise SpecError.at(error.path, "This is a value, not a table.") from None
