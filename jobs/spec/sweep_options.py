"""Leave out options that a job of a sweep does not use; a single job with such options is refused.

A sweep over run.algorithm = ["fedavg", "fedprox"] has one table [run.fedprox] for those of its jobs that use it. A
table that no job of the sweep uses stays, and is refused as in any specification.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from training.config import choices
from training.federation import custom
from training.federation.config import with_custom_recipe


def unused_tables(
    data: Mapping[str, Any], over: Mapping[str, list[Any]], *, values: Mapping[str, Any] | None = None
) -> set[str]:
    """Return the names of choices that other jobs of the sweep use and the job with this data does not.

    `values`: those of the job by path, where they are not yet in the data.
    """
    fields = choices.CHOICE_FIELDS.get(str(data.get("kind", "distributed")), {})
    run = data.get("run") or {}
    if not isinstance(run, Mapping):
        return set()
    run = {**run, **{_field(path): value for path, value in (values or {}).items()}}
    swept = {
        name for path, values in over.items() if _field(path) in fields for value in values for name in _names(value)
    }
    return swept - {name for field in fields for name in _names(run.get(field))}


def without_tables(run: Any, tables: set[str]) -> None:
    """Remove the tables from [run] and [run.options], in place: plain data or a document with comments."""
    for place in (run, run.get("options") if isinstance(run, Mapping) else None):
        if isinstance(place, Mapping):
            for name in tables & set(place):
                place.pop(name)  # type: ignore[attr-defined]


def without_code(data: Any, over: Mapping[str, list[Any]]) -> None:
    """Remove [client], in place, from a job that uses no file of it while others of the sweep do."""
    run = data.get("run") if isinstance(data, Mapping) else None
    if not isinstance(run, Mapping) or "client" not in data or custom.chosen(with_custom_recipe(run)):
        return
    if any(part.choice in over.get(f"run.{part.field}", []) for part in custom.PARTS):
        data.pop("client")


def is_within(path: str, tables: set[str]) -> bool:
    """Return whether a path such as run.fedprox.mu is in one of the tables."""
    parts = path.split(".")
    return bool(tables & set(parts[1:3] if parts[1:2] == ["options"] else parts[1:2]))


def _field(path: str) -> str:
    return path.removeprefix("run.")


def _names(value: Any) -> Iterator[str]:
    for name in value if isinstance(value, list) else [value]:
        if isinstance(name, str):
            yield name
