"""Describe the layout that `parallelism = "auto"` chose in an attempt, as reported by rank 0.

An event comes from the job's own directory, so its content is not trusted.
"""

from __future__ import annotations

from dataclasses import dataclass

from vigil_core import formatting

MAX_ITEMS, MAX_TEXT = 20, 300


@dataclass(frozen=True)
class ChosenLayout:
    """`what` is the layout, "fsdp: dp 4 × shard 8"; `why` lists the alternatives that were tried and their results."""

    what: str
    why: str


def layout(data: dict[str, object]) -> ChosenLayout:
    mesh, why = data.get("mesh"), data.get("why")
    axes = list(mesh.items())[:MAX_ITEMS] if isinstance(mesh, dict) else []
    along = " × ".join(f"{str(axis)[:MAX_TEXT]} {size}" for axis, size in axes if type(size) is int and size > 1)
    tried = [str(way)[:MAX_TEXT] for way in why[:MAX_ITEMS]] if isinstance(why, list) else []
    return ChosenLayout(
        f"{str(data.get('parallelism', formatting.MISSING))[:MAX_TEXT]}: {along or 'one rank'}", "; ".join(tried)
    )
