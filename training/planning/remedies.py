"""Find the nearest changes that would work where a plan finds nothing: settings, ranks, contexts or memory.

Each is tried by the planner itself. None is applied unasked: each costs time, or changes the run's numbers
(docs/decisions/0022).
"""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import replace
from functools import partial

from training.config import shape as shapes
from training.config.dims import Dims
from training.config.run_config import RunConfig
from training.planning import settings
from training.planning.changes import Change, apply_change, without
from training.planning.layouts import LayoutPlan, Ranks, context_of, estimate_of, least_memory
from training.planning.trial import ChangeTrials
from training.units import GIB, size_text

NOTHING = "No setting, number of ranks or amount of memory that was tried would help."
TIMES = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
"""Multiples of the number of ranks that are tried."""
NEAR = 3
"""Numbers of ranks that are tried with the configured batch, before another batch is suggested."""
SHORTEST = 1024
"""Tokens: the shortest context that is suggested."""


def describe_remedies(config: RunConfig, ranks: Ranks, dims: Dims | None) -> str:
    """Return sentences about settings with which the run would fit.

    The cheapest ones that work here, or what works with slower memory, more ranks or fewer tokens.
    """
    search = _Search(config, ranks, dims)
    base_change = search.ignoring_memory()
    if base_change is None:
        return NOTHING
    if here := search.here(base_change):
        return f"This would work: {here}."
    slower, fewer_tokens = search.offloaded(base_change), search.shorter(base_change)
    remedies = list(
        filter(None, (slower, search.with_more_ranks(base_change), fewer_tokens, search.with_more_memory(base_change)))
    )
    if not remedies:
        return NOTHING
    text = f"{'These' if len(remedies) > 1 else 'This'} would work: {'; '.join(remedies)}."
    return text if slower or fewer_tokens else f"No setting is enough on these ranks. {text}"


class _Search:
    """Tries changes, the least costly first."""

    def __init__(self, config: RunConfig, ranks: Ranks, dims: Dims | None) -> None:
        self._config, self._ranks, self._dims = config, ranks, dims
        self._trials = ChangeTrials(config, ranks, dims)
        self._unrestricted = settings.without_restrictions(config, ranks)
        self._lightest = settings.all_memory_savings(config, ranks)

    def ignoring_memory(self) -> Change | None:
        """Return the smallest change with which some layout works if memory is ignored; None: nothing works."""
        boundless = replace(self._ranks, memory_bytes=None)
        if self._trials.find({}, boundless):
            return {}
        if not self._trials.find(self._unrestricted, boundless) and not self._dims:
            self._unrestricted = {**settings.without_size_options(self._config), **self._unrestricted}
        return self._trials.minimal(self._unrestricted, boundless)

    def here(self, base: Change) -> str | None:
        """Return the cheapest settings with which the run fits these ranks.

        They are in addition to `base`, which is needed anyway.
        """
        changes: list[Change] = [base] if base else []
        changes += [{**base, **lighter} for lighter in settings.memory_savings(self._config, self._ranks)]
        for change in [*changes, {**self._unrestricted, **self._lightest}]:
            if smallest := self._trials.minimal(change, self._ranks):
                return self._trials.describe(smallest, self._ranks)
        return None

    def offloaded(self, base: Change) -> str | None:
        """Return the change that turns on offload, which is slow.

        Weights come from main memory per micro-batch, and AdamW runs on the CPU.
        """
        if self._ranks.on_cpu or self._config.options_of("fsdp").get("offload"):
            return None
        layout = {} if self._config.parallelism in (shapes.AUTO, "fsdp") else {"parallelism": "fsdp"}
        for more in ({}, self._lightest):
            change = {**base, **layout, "fsdp.offload": True, **more}
            if found := self._trials.find(change, self._ranks):
                requirement = f"with {size_text(_resident(found))} of main memory a rank"
                return f"{self._trials.describe(change, self._ranks)}, {requirement}"
        return None

    def with_more_ranks(self, base: Change) -> str | None:
        """Return the smallest number of such ranks that works."""
        for change in (base, self._unrestricted):
            candidates = [replace(self._ranks, world_size=self._ranks.world_size * times) for times in TIMES]
            first = bisect_left(candidates, True, key=partial(self._fits, change))
            # Another batch is suggested only if the configured one divides over none of the nearest numbers.
            for ranks in candidates[first:][:NEAR]:
                for more in ({}, self._lightest):
                    if self._trials.find({**base, **more}, ranks):
                        return self._trials.describe({**base, **more}, ranks)
            for ranks in candidates[first:][:1]:
                if minimal := self._trials.minimal(self._all(change, ranks), ranks):
                    return self._trials.describe(minimal, ranks)
        return None

    def shorter(self, base: Change) -> str | None:
        """Return the longest shorter context that works: half, a quarter, …"""
        context = context_of(self._config, self._dims) if "context" in self._config.recipe_options() else 0
        path = f"{self._config.recipe}.context"
        changes = [{**base, path: context >> times} for times in range(1, (context // SHORTEST).bit_length())]
        first = bisect_left(
            changes, True, key=lambda change: self._trials.find({**change, **self._lightest}, self._ranks) is not None
        )
        for change in changes[first:][:1]:
            for more in ({}, self._lightest):
                if self._trials.find({**change, **more}, self._ranks):
                    return self._trials.describe({**change, **more}, self._ranks)
        return None

    def with_more_memory(self, base: Change) -> str | None:
        """Return the least memory that any layout needs, with the settings that save most."""
        for change in ({**base, **self._lightest}, {**self._unrestricted, **self._lightest}):
            config = self._trials.apply(change)
            memory = least_memory(config, self._ranks, self._dims) if config else None
            if memory is not None:
                ranks = replace(self._ranks, memory_bytes=math.ceil(memory / GIB) * GIB)
                if self._trials.find(change, ranks):
                    return self._trials.describe(change, ranks)
        return None

    def _fits(self, change: Change, ranks: Ranks) -> bool:
        return self._trials.find(self._all(change, ranks), ranks) is not None

    def _all(self, change: Change, ranks: Ranks) -> Change:
        """Return the change with a batch and settings that allow as many ranks as possible."""
        return {"global_batch": settings.divisible_batch(ranks), **without(change, "global_batch"), **self._lightest}


def _resident(found: LayoutPlan) -> int:
    """Return the main memory that offload uses."""
    needs = estimate_of(apply_change(found.config, {"fsdp.offload": False}), found.shape, found.micro)
    return needs.weights + needs.gradients + needs.optimizer if needs else 0
