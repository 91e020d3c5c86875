"""Where a run's weights come from at its start: its seed, weights that it names, a checkpoint, a base and adapters.

The weights that a run names settle its sizes. They are looked at once, by rank 0 of a fresh start; from then on the
settled options are the run's configuration, lie in its checkpoints, and a resume takes them from there: the weights
themselves may be gone by then.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from training.attempt.place import Place
from training.config.asked import Asked
from training.contracts import Recipe
from training.corpus.errors import DataError
from training.loader.supply import Telling
from training.manifest import CheckpointError, Manifest
from training.runtime.distributed import World
from training.weights import named
from training.weights.base import Base

C = TypeVar("C", bound=Asked)


@dataclass(frozen=True)
class Origin:
    """Where one run's weights come from, on one rank."""

    path: Path | None = None
    """Weights to be read; None: the seed or a checkpoint has all of them."""
    base: Base | None = None
    """What its adapters are beside, if it trains adapters."""


def as_trained(config: C, start: Manifest | None) -> C:
    """The configuration with what the weights had settled before the checkpoint, where it leaves that open."""
    recipe = config.recipe
    before = start.config.get(recipe) if start else None
    if named.named(config) is None or not isinstance(before, dict):
        return config
    options = config.recipe_options()
    open_ones = {
        name: before[name] for name, value in options.items() if name in before and (value is None or value is False)
    }
    return named.with_options(config, {**options, **open_ones})


def settle(
    recipe: Recipe,
    config: C,
    place: Place,
    world: World,
    start: Manifest | None,
    telling: Telling,
    *,
    has_adapters: bool,
) -> tuple[C, Origin]:
    """The configuration with the sizes of the weights that it names, and what each rank reads of them.

    DataError where they are not there, or not such. With adapters they are copied beside the checkpoints.
    """
    weights = named.named(config)
    if weights is None:
        return config, Origin()
    base = Base(place.job_dir) if has_adapters else None
    found: C = telling.by_rank_0(lambda tell: _settled(recipe, config, weights, base, start, tell))
    if base is not None:
        return found, Origin(base.path, base)
    return found, Origin(weights if start is None else None)


def _settled(
    recipe: Recipe,
    config: C,
    weights: Path,
    base: Base | None,
    start: Manifest | None,
    tell: Callable[[], None],
) -> C:
    """The configuration as the weights settle it, on rank 0."""
    if start is not None:
        if base is not None:
            try:
                base.verify(tell)
            except CheckpointError as error:
                raise CheckpointError(f"{start.name} can't be resumed from: {error}") from None
        return config
    if base is None:
        return named.settled(recipe, config)
    if not base.is_kept:
        named.settled(recipe, config)  # nothing is copied that could not be started from
    try:
        base.keep(weights, tell)
    except DataError as error:
        raise error.within(f"run.{config.recipe}") from None
    return named.settled(recipe, config, base.path)  # those named may be others by now
