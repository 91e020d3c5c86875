"""Changes of one run tried by the plan: whether they work, what of them is needed, and how they are told."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from pydantic import ValidationError

from training.config import shape as shapes
from training.config.dims import Dims
from training.config.run_config import RunConfig
from training.planning.changes import Change, changed, without, words
from training.planning.ways import Plan, Ranks, batches, find
from training.units import GIB, size_text

MICRO_BATCH = "micro_batch"
NEAREST = 8
"""Global batches that are tried before one that divides in any case."""


class Trial:
    """Of one run, on its own ranks or on others; each change is planned once."""

    def __init__(self, config: RunConfig, ranks: Ranks, dims: Dims | None) -> None:
        self._config, self._ranks, self._dims = config, ranks, dims
        self._plans: dict[tuple[Any, ...], Plan | None] = {}

    def find(self, change: Change, ranks: Ranks) -> Plan | None:
        """None: it does not work."""
        key = (frozenset(change.items()), ranks)
        if key not in self._plans:
            self._plans[key] = self._plan(change, ranks)
        return self._plans[key]

    def made(self, change: Change) -> RunConfig | None:
        """None: these settings are refused as such."""
        try:
            return changed(self._config, change)
        except ValidationError:
            return None

    def least_of(self, every: Change, ranks: Ranks) -> Change | None:
        """What can't be left out of it, one by one, and as near to what was asked as it can be; None: it is in vain."""
        if not self.find(every, ranks):
            return None
        kept = every
        for path in every:
            if path != MICRO_BATCH:  # it changes no number, so it is the last to be kept
                kept = self._first([without(kept, path)], kept, ranks)
        if kept.get("recompute") == "full" and self._config.recompute == "none":
            kept = self._first([{**kept, "recompute": "selective"}], kept, ranks)
        for axis in [axis for axis in self._config.mesh if f"mesh.{axis}" in kept]:
            kept = self._first([{**kept, f"mesh.{axis}": size} for size in self._sizes_near(axis)], kept, ranks)
        if "global_batch" in kept:
            config = self.made(without(kept, "global_batch"))
            sizes = batches(config, ranks, self._dims)[:NEAREST] if config else []
            kept = self._first([{**kept, "global_batch": size} for size in sizes], kept, ranks)
        return self._first([without(kept, MICRO_BATCH)], kept, ranks)

    def said(self, change: Change, ranks: Ranks) -> str:
        """What to write, and what it comes to."""
        found = self.find(change, ranks)
        assert found is not None
        if change.get(MICRO_BATCH, 0) is None:  # rather the size that auto has found, where it finds the same with it
            sized = {**change, MICRO_BATCH: found.micro}
            change = self._first([sized], change, ranks)
            found = self.find(change, ranks) or found
        said = words(self._config, change)
        if ranks.world_size != self._ranks.world_size:
            said.insert(0, f"{ranks.world_size} such ranks")
        if ranks.memory_bytes and ranks.memory_bytes != self._ranks.memory_bytes:
            said.insert(0, f"ranks with {ranks.memory_bytes // GIB} GiB")
        takes = f", {size_text(found.footprint.total)} a rank" if found.footprint else ""
        return f"{' and '.join(said)} ({found.config.parallelism}, {found.shape}, micro-batch {found.micro}{takes})"

    def _plan(self, change: Change, ranks: Ranks) -> Plan | None:
        config = self.made(change)
        if config is None:
            return None
        context = config.recipe_options().get("context")
        dims = replace(self._dims, context=int(context)) if self._dims and context else self._dims
        found = find(config, ranks, dims)
        return found if isinstance(found, Plan) else None

    def _first(self, some: Iterable[Change], otherwise: Change, ranks: Ranks) -> Change:
        """That works."""
        return next((change for change in some if self.find(change, ranks)), otherwise)

    def _sizes_near(self, axis: str) -> list[int]:
        asked = self._config.mesh[axis]
        others = [size for size in shapes.divisors(self._ranks.world_size) if size not in (1, asked)]
        return sorted(others, key=lambda size: abs(size - asked))[:2]
