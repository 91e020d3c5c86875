"""Check a run's layout on a given number of ranks: its mesh, its communication and its steps. No torch."""

from __future__ import annotations

from collections.abc import Iterator

from training.config import communication, mesh, shape
from training.config.base import Problem
from training.config.dims import Dims
from training.config.run_config import RunConfig


def check(
    config: RunConfig, world_size: int, dims: Dims | None = None, *, allow_uneven: bool = False
) -> Iterator[Problem]:
    """Yield what cannot work in a given layout on this many ranks, with the nearest values that can.

    For a layout that may be "auto" call training.planning.checking. `dims`: the model's sizes, if its data has
    determined the vocabulary; else they follow from the recipe's options. `allow_uneven`: the run was made for more
    ranks, so shares of the batch may be uneven.
    """
    assert config.parallelism != shape.AUTO
    for misfit in mesh.check(config, world_size, dims, allow_uneven=allow_uneven):
        yield Problem(misfit.field, str(misfit))
    for misfit in communication.check(config, world_size):
        yield Problem(misfit.field, str(misfit))
    yield from config.check_steps()
