"""Determine on how many nodes a run can share its work: not every number fits every layout."""

from __future__ import annotations

import functools
from pathlib import Path

from training.launch.plan import LaunchPlan


def max_usable_nodes(plan: LaunchPlan, available: int) -> int:
    """Return the largest number of nodes, at most `available`, on which the run can continue; 0: on none of them.

    With a layout that needs a multiple of some number, the remaining nodes stand by.
    """
    available = min(available, plan.max_nodes)
    if not plan.is_elastic or plan.script is not None:
        return available
    path = plan.run_dir / "portal" / "run.toml"
    fit = (count for count in range(available, plan.min_nodes - 1, -1) if _fits(path, count * plan.ranks_per_node))
    return next(fit, 0)


@functools.cache
def _fits(path: Path, world_size: int) -> bool:
    """Return whether the run's own check accepts this world size.

    If it cannot be checked, try: the ranks report errors.
    """
    # Imported here, as only elastic jobs need it: it takes a tenth of a second.
    from training import run_file
    from training.config.base import ConfigError
    from training.config.run_config import RunConfig
    from training.planning import checking

    try:
        settings = run_file.load(path).config
    except ConfigError:
        return True
    if not isinstance(settings, RunConfig):
        return True  # a federation's clients run on any number of ranks
    # An elastic run continues with uneven shares and more accumulation, except in a pipeline.
    return checking.can_work(settings, world_size, allow_uneven=True)
