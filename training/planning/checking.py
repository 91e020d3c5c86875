"""Check, before allocation, whether a run can work on a number of ranks, with a given or an automatic layout.

No torch.
"""

from __future__ import annotations

from collections.abc import Iterator

from training.config import choices, layout_checks
from training.config import shape as shapes
from training.config.base import ConfigError, Problem
from training.config.dims import Dims
from training.config.run_config import RunConfig
from training.planning.layouts import LayoutPlan, Ranks, find
from training.planning.plan import plan


def problems(
    config: RunConfig, world_size: int, dims: Dims | None = None, *, allow_uneven: bool = False
) -> Iterator[Problem]:
    """Yield what cannot work, with the nearest values that can. For auto: whether any layout can, regardless of memory.

    `dims`: the model's sizes, if its data has determined the vocabulary; else they follow from the recipe's options.
    `allow_uneven`: the run was made for more ranks, so shares of the batch may be uneven.
    """
    if config.parallelism != shapes.AUTO:
        yield from layout_checks.check(config, world_size, dims, allow_uneven=allow_uneven)
        return
    found = list(_auto_problems(config, Ranks(world_size, world_size, None, allow_uneven), dims))
    yield from found
    reported = {problem.field for problem in found}
    yield from (problem for problem in config.check_steps() if problem.field not in reported)


@choices.caching()
def can_work(config: RunConfig, world_size: int, *, allow_uneven: bool = False) -> bool:
    """Return whether there are no problems; faster than `problems`, as no remedies are searched for."""
    if config.parallelism != shapes.AUTO:
        return not any(layout_checks.check(config, world_size, allow_uneven=allow_uneven))
    return isinstance(find(config, Ranks(world_size, world_size, None, allow_uneven)), LayoutPlan)


def _auto_problems(config: RunConfig, ranks: Ranks, dims: Dims | None) -> Iterator[Problem]:
    try:
        plan(config, ranks, dims)
    except ConfigError as error:
        for problem in error.problems:
            yield Problem(problem.field.removeprefix("run."), problem.message)
