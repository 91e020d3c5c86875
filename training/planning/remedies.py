"""What nearest would work where a plan finds nothing: settings, ranks, contexts, memory, each tried by the plan itself.

Nothing of it is done unasked: each costs time, or changes the run's numbers (docs/decisions/0022).
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
from training.planning.changes import Change, changed, without
from training.planning.trial import Trial
from training.planning.ways import Plan, Ranks, context_of, estimate_of, least_memory
from training.units import GIB, size_text

NOTHING = "No setting, number of ranks or memory that was tried mends it."
TIMES = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
"""So many times the ranks are tried."""
NEAR = 3
"""Numbers of ranks that are tried with the batch as it was asked for, before another batch is told."""
SHORTEST = 1024
"""Tokens: nobody who asked for more is told to take a shorter context."""


def told(config: RunConfig, ranks: Ranks, dims: Dims | None) -> str:
    """Sentences: the cheapest settings that work here, or what needs slower memory, other ranks, or fewer tokens."""
    search = _Search(config, ranks, dims)
    apart = search.apart_from_memory()
    if apart is None:
        return NOTHING
    if here := search.here(apart):
        return f"This would work: {here}."
    slower, fewer_tokens = search.offloaded(apart), search.shorter(apart)
    ways = list(filter(None, (slower, search.on_more(apart), fewer_tokens, search.with_more_memory(apart))))
    if not ways:
        return NOTHING
    said = f"{'These' if len(ways) > 1 else 'This'} would work: {'; '.join(ways)}."
    return said if slower or fewer_tokens else f"No setting is enough on these ranks. {said}"


class _Search:
    """What to try, and in which order."""

    def __init__(self, config: RunConfig, ranks: Ranks, dims: Dims | None) -> None:
        self._config, self._ranks, self._dims = config, ranks, dims
        self._tried = Trial(config, ranks, dims)
        self._plainest = settings.plainest(config, ranks)
        self._lightest = settings.lightest(config, ranks)

    def apart_from_memory(self) -> Change | None:
        """The least to be changed for some way to work on these ranks, had they memory enough; None: nothing does."""
        boundless = replace(self._ranks, memory_bytes=None)
        if self._tried.find({}, boundless):
            return {}
        if not self._tried.find(self._plainest, boundless) and not self._dims:
            self._plainest = {**settings.sizes(self._config), **self._plainest}
        return self._tried.least_of(self._plainest, boundless)

    def here(self, apart: Change) -> str | None:
        """Settings with which it fits these ranks: the cheapest beside those that it needs in any case, or any."""
        some: list[Change] = [apart] if apart else []
        some += [{**apart, **lighter} for lighter in settings.lighter(self._config, self._ranks)]
        for change in [*some, {**self._plainest, **self._lightest}]:
            if least := self._tried.least_of(change, self._ranks):
                return self._tried.said(least, self._ranks)
        return None

    def offloaded(self, apart: Change) -> str | None:
        """Slow: weights come from main memory for each micro-batch, and AdamW runs on the CPU."""
        if self._ranks.on_cpu or self._config.options_of("fsdp").get("offload"):
            return None
        own = {} if self._config.parallelism in (shapes.AUTO, "fsdp") else {"parallelism": "fsdp"}
        for more in ({}, self._lightest):
            change = {**apart, **own, "fsdp.offload": True, **more}
            if found := self._tried.find(change, self._ranks):
                beside = f"with {size_text(_resident(found))} of main memory a rank"
                return f"{self._tried.said(change, self._ranks)}, {beside}"
        return None

    def on_more(self, apart: Change) -> str | None:
        """The smallest number of such ranks."""
        for every in (apart, self._plainest):
            some = [replace(self._ranks, world_size=self._ranks.world_size * times) for times in TIMES]
            least = bisect_left(some, True, key=partial(self._fits, every))
            # Another batch is told only where the one that was asked for divides over none that are near.
            for ranks in some[least:][:NEAR]:
                for more in ({}, self._lightest):
                    if self._tried.find({**apart, **more}, ranks):
                        return self._tried.said({**apart, **more}, ranks)
            for ranks in some[least:][:1]:
                if change := self._tried.least_of(self._all(every, ranks), ranks):
                    return self._tried.said(change, ranks)
        return None

    def shorter(self, apart: Change) -> str | None:
        """Half the context, a quarter, …"""
        asked = context_of(self._config, self._dims) if "context" in self._config.recipe_options() else 0
        path = f"{self._config.recipe}.context"
        some = [{**apart, path: asked >> times} for times in range(1, (asked // SHORTEST).bit_length())]
        least = bisect_left(
            some, True, key=lambda change: self._tried.find({**change, **self._lightest}, self._ranks) is not None
        )
        for change in some[least:][:1]:
            for more in ({}, self._lightest):
                if self._tried.find({**change, **more}, self._ranks):
                    return self._tried.said({**change, **more}, self._ranks)
        return None

    def with_more_memory(self, apart: Change) -> str | None:
        """The least that any way needs, with the settings that save most."""
        for change in ({**apart, **self._lightest}, {**self._plainest, **self._lightest}):
            config = self._tried.made(change)
            least = least_memory(config, self._ranks, self._dims) if config else None
            if least is not None:
                ranks = replace(self._ranks, memory_bytes=math.ceil(least / GIB) * GIB)
                if self._tried.find(change, ranks):
                    return self._tried.said(change, ranks)
        return None

    def _fits(self, change: Change, ranks: Ranks) -> bool:
        return self._tried.find(self._all(change, ranks), ranks) is not None

    def _all(self, change: Change, ranks: Ranks) -> Change:
        """With a batch and settings that allow as many ranks as there may be."""
        return {"global_batch": settings.dividing(ranks), **without(change, "global_batch"), **self._lightest}


def _resident(found: Plan) -> int:
    """What offload keeps in main memory."""
    needs = estimate_of(changed(found.config, {"fsdp.offload": False}), found.shape, found.micro)
    return needs.weights + needs.gradients + needs.optimizer if needs else 0
