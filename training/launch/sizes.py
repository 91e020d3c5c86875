"""How many nodes a run can share its work over: not every number fits every layout."""

from __future__ import annotations

import functools
from pathlib import Path

from training.launch.plan import Plan


def most_nodes(plan: Plan, there: int) -> int:
    """The largest number of nodes, at most those that are there, on which the run can go on; 0: on none of them.

    With a layout that needs a multiple of some number, the others stand by.
    """
    there = min(there, plan.max_nodes)
    if not plan.is_elastic or plan.script is not None:
        return there
    path = plan.run_dir / "portal" / "run.toml"
    fit = (count for count in range(there, plan.min_nodes - 1, -1) if _fits(path, count * plan.ranks_per_node))
    return next(fit, 0)


@functools.cache
def _fits(path: Path, world_size: int) -> bool:
    """Whether the run's own check lets it run so. What cannot be checked is tried: then the ranks say what is wrong."""
    # Here, as only elastic jobs need it: it takes a tenth of a second.
    from training import run_file
    from training.config.asked import ConfigError
    from training.config.run_config import RunConfig
    from training.planning import checking

    try:
        settings = run_file.load(path).config
    except ConfigError:
        return True
    if not isinstance(settings, RunConfig):
        return True  # a federation's clients spread over any ranks
    # An elastic run goes on with uneven shares and more accumulation, but for a pipeline.
    return checking.can_work(settings, world_size, lacking=True)
