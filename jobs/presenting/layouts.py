"""The layout that `parallelism = "auto"` came to in an attempt, and why, as its rank 0 told it.

An event comes from the job's own folder, so nothing of it is believed beyond its shape.
"""

from __future__ import annotations

from dataclasses import dataclass

from vigil_core import formatting

MOST, TEXT = 20, 300


@dataclass(frozen=True)
class Layout:
    """`what`: "fsdp: dp 4 × shard 8"; `why`: each way that was tried, and what came of it."""

    what: str
    why: str


def layout(data: dict[str, object]) -> Layout:
    mesh, why = data.get("mesh"), data.get("why")
    axes = list(mesh.items())[:MOST] if isinstance(mesh, dict) else []
    along = " × ".join(f"{str(axis)[:TEXT]} {size}" for axis, size in axes if type(size) is int and size > 1)
    tried = [str(way)[:TEXT] for way in why[:MOST]] if isinstance(why, list) else []
    return Layout(f"{str(data.get('parallelism', formatting.MISSING))[:TEXT]}: {along or 'one rank'}", "; ".join(tried))
