"""What can't work of a run on so many ranks, before anything is allocated, its layout given or chosen; no torch."""

from __future__ import annotations

from collections.abc import Iterator

from training.config import choices
from training.config import shape as shapes
from training.config.asked import ConfigError, Problem
from training.config.dims import Dims
from training.config.run_config import RunConfig
from training.planning.plan import plan
from training.planning.ways import Plan, Ranks, find


def problems(
    config: RunConfig, world_size: int, dims: Dims | None = None, *, lacking: bool = False
) -> Iterator[Problem]:
    """Each with the nearest values that work. Of auto: whether any way can, whatever the memory, which is known where
    it runs.

    `dims`: the model's sizes where its data has told the vocabulary; else as the recipe's options give them.
    `lacking`: of a run that was made for more: shares of the batch may be uneven.
    """
    if config.parallelism != shapes.AUTO:
        yield from config.check(world_size, dims, lacking=lacking)
        return
    found = list(_of_auto(config, Ranks(world_size, world_size, None, lacking), dims))
    yield from found
    told = {problem.field for problem in found}
    yield from (problem for problem in config.check_steps() if problem.field not in told)


@choices.held()
def can_work(config: RunConfig, world_size: int, *, lacking: bool = False) -> bool:
    """Whether there are no problems: for those who ask of many numbers of ranks, and tell nobody a remedy."""
    if config.parallelism != shapes.AUTO:
        return not any(config.check(world_size, lacking=lacking))
    return isinstance(find(config, Ranks(world_size, world_size, None, lacking)), Plan)


def _of_auto(config: RunConfig, ranks: Ranks, dims: Dims | None) -> Iterator[Problem]:
    try:
        plan(config, ranks, dims)
    except ConfigError as error:
        for problem in error.problems:
            yield Problem(problem.field.removeprefix("run."), problem.message)
