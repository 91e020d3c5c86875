"""Determine where a run's weights come from: its seed, weights that it names, a checkpoint, or a base and adapters.

The weights that a run names determine its sizes. Rank 0 inspects them once, at the first start; from then on these
sizes are part of the run's configuration and its checkpoints, and a resume takes them from there: the weights
themselves may be gone by then.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from training.attempt.workspace import Workspace
from training.config.base import BaseRunConfig
from training.contracts import Recipe
from training.corpus.errors import DataError
from training.loader.supply import LeaderWork
from training.manifest import CheckpointError, Manifest
from training.runtime.distributed import World
from training.weights import configured
from training.weights.base import BaseWeights

C = TypeVar("C", bound=BaseRunConfig)


@dataclass(frozen=True)
class WeightsOrigin:
    """Where one run's weights come from, on one rank."""

    path: Path | None = None
    """Weights to be read; None: all come from the seed or a checkpoint."""
    base: BaseWeights | None = None
    """The frozen weights that its adapters are for, if it trains adapters."""


def as_trained(config: C, start: Manifest | None) -> C:
    """Return the configuration with open options as the weights had determined them before the checkpoint."""
    recipe = config.recipe
    before = start.config.get(recipe) if start else None
    if configured.weights_path(config) is None or not isinstance(before, dict):
        return config
    options = config.recipe_options()
    determined = {
        name: before[name] for name, value in options.items() if name in before and (value is None or value is False)
    }
    return configured.with_options(config, {**options, **determined})


def resolve_weights(
    recipe: Recipe,
    config: C,
    workspace: Workspace,
    world: World,
    start: Manifest | None,
    leader_task: LeaderWork,
    *,
    has_adapters: bool,
) -> tuple[C, WeightsOrigin]:
    """Return the configuration with the sizes of the weights that it names, and what each rank reads of them.

    Raises DataError if they are missing or unsuitable. With adapters they are copied next to the checkpoints.
    """
    weights = configured.weights_path(config)
    if weights is None:
        return config, WeightsOrigin()
    base = BaseWeights(workspace.job_dir) if has_adapters else None
    resolved: C = leader_task.run(
        lambda on_progress: _resolve_on_rank_0(recipe, config, weights, base, start, on_progress)
    )
    if base is not None:
        return resolved, WeightsOrigin(base.path, base)
    return resolved, WeightsOrigin(weights if start is None else None)


def _resolve_on_rank_0(
    recipe: Recipe,
    config: C,
    weights: Path,
    base: BaseWeights | None,
    start: Manifest | None,
    on_progress: Callable[[], None],
) -> C:
    """Return the configuration, resolved by rank 0."""
    if start is not None:
        if base is not None:
            try:
                base.verify(on_progress)
            except CheckpointError as error:
                raise CheckpointError(f"{start.name} can't be resumed from: {error}") from None
        return config
    if base is None:
        return configured.with_sizes(recipe, config)
    if not base.is_copied:
        configured.with_sizes(recipe, config)  # check first: do not copy unsuitable weights
    try:
        base.copy(weights, on_progress)
    except DataError as error:
        raise error.within(f"run.{config.recipe}") from None
    return configured.with_sizes(recipe, config, base.path)  # the originals may have changed by now
