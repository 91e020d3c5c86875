"""Try changes of one run with the planner: whether they work, what of them is necessary, and how to describe them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from pydantic import ValidationError

from training.config import shape as shapes
from training.config.dims import Dims
from training.config.run_config import RunConfig
from training.planning.changes import Change, apply_change, change_texts, without
from training.planning.layouts import LayoutPlan, Ranks, batches, find
from training.units import GIB, size_text

MICRO_BATCH = "micro_batch"
NEAREST = 8
"""Number of global batches that are tried before one that always divides."""


class ChangeTrials:
    """Tries changes of one run, on its own ranks or on others; each change is planned only once."""

    def __init__(self, config: RunConfig, ranks: Ranks, dims: Dims | None) -> None:
        self._config, self._ranks, self._dims = config, ranks, dims
        self._plans: dict[tuple[Any, ...], LayoutPlan | None] = {}

    def find(self, change: Change, ranks: Ranks) -> LayoutPlan | None:
        """Return the plan for a change; None if it does not work."""
        key = (frozenset(change.items()), ranks)
        if key not in self._plans:
            self._plans[key] = self._plan(change, ranks)
        return self._plans[key]

    def apply(self, change: Change) -> RunConfig | None:
        """Return the changed configuration; None if these settings are invalid."""
        try:
            return apply_change(self._config, change)
        except ValidationError:
            return None

    def minimal(self, change: Change, ranks: Ranks) -> Change | None:
        """Return the change without what is unnecessary, and as close as possible to the configuration.

        None if it fails.
        """
        if not self.find(change, ranks):
            return None
        needed = change
        for path in change:
            if path != MICRO_BATCH:  # it does not affect the run's numbers, so it is removed last
                needed = self._first_working([without(needed, path)], needed, ranks)
        if needed.get("recompute") == "full" and self._config.recompute == "none":
            needed = self._first_working([{**needed, "recompute": "selective"}], needed, ranks)
        for axis in [axis for axis in self._config.mesh if f"mesh.{axis}" in needed]:
            needed = self._first_working(
                [{**needed, f"mesh.{axis}": size} for size in self._sizes_near(axis)], needed, ranks
            )
        if "global_batch" in needed:
            config = self.apply(without(needed, "global_batch"))
            sizes = batches(config, ranks, self._dims)[:NEAREST] if config else []
            needed = self._first_working([{**needed, "global_batch": size} for size in sizes], needed, ranks)
        return self._first_working([without(needed, MICRO_BATCH)], needed, ranks)

    def describe(self, change: Change, ranks: Ranks) -> str:
        """Describe what to write, and the resulting layout."""
        found = self.find(change, ranks)
        assert found is not None
        if change.get(MICRO_BATCH, 0) is None:  # name the size that auto chose instead, if that gives the same plan
            sized = {**change, MICRO_BATCH: found.micro}
            change = self._first_working([sized], change, ranks)
            found = self.find(change, ranks) or found
        texts = change_texts(self._config, change)
        if ranks.world_size != self._ranks.world_size:
            texts.insert(0, f"{ranks.world_size} such ranks")
        if ranks.memory_bytes and ranks.memory_bytes != self._ranks.memory_bytes:
            texts.insert(0, f"ranks with {ranks.memory_bytes // GIB} GiB")
        memory = f", {size_text(found.footprint.total)} a rank" if found.footprint else ""
        return f"{' and '.join(texts)} ({found.config.parallelism}, {found.shape}, micro-batch {found.micro}{memory})"

    def _plan(self, change: Change, ranks: Ranks) -> LayoutPlan | None:
        config = self.apply(change)
        if config is None:
            return None
        context = config.recipe_options().get("context")
        dims = replace(self._dims, context=int(context)) if self._dims and context else self._dims
        found = find(config, ranks, dims)
        return found if isinstance(found, LayoutPlan) else None

    def _first_working(self, changes: Iterable[Change], otherwise: Change, ranks: Ranks) -> Change:
        """Return the first change that works, or `otherwise`."""
        return next((change for change in changes if self.find(change, ranks)), otherwise)

    def _sizes_near(self, axis: str) -> list[int]:
        configured = self._config.mesh[axis]
        others = [size for size in shapes.divisors(self._ranks.world_size) if size not in (1, configured)]
        return sorted(others, key=lambda size: abs(size - configured))[:2]
