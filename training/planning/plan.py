"""Choose a run's axes by the model's size, the memory of a rank and which ranks share a node; numbers alone, no torch.

    parallelism = "auto"

This sets the mesh and the micro-batch, which change none of the run's numbers, and no other setting: where nothing
fits, the error names the nearest changes that do, which it has tried (training.planning.remedies;
docs/decisions/0022).
"""

from __future__ import annotations

from training.config import choices, layout_checks, mesh
from training.config import shape as shapes
from training.config.base import ConfigError, Problem
from training.config.dims import Dims
from training.config.run_config import RunConfig
from training.planning import remedies
from training.planning.layouts import LayoutPlan, LayoutRefusal, Ranks, estimate_of, find
from training.units import size_text

MAX_LISTED = 3
"""Layouts listed one by one in an error if they need too much memory; of more, only the first and the smallest."""


@choices.caching()
def plan(config: RunConfig, ranks: Ranks, dims: Dims | None = None) -> LayoutPlan:
    """Choose what `auto` leaves open, and estimate the memory. Raises ConfigError if nothing can work.

    `dims`: the model's sizes, if its data has determined the vocabulary; else they follow from the recipe's options.
    """
    if config.parallelism != shapes.AUTO:
        return _plan_given(config, ranks, dims)
    found = find(config, ranks, dims)
    if isinstance(found, LayoutPlan):
        return found
    problems = {refusal.problem for refusal in found}
    if len(problems) == 1 and (only := problems.pop()).field:  # another layout would not help
        raise ConfigError(
            [Problem(f"run.{only.field}", f"{only.message} {remedies.describe_remedies(config, ranks, dims)}")]
        )
    sentences = [
        "auto found no layout that works.",
        f"Tried: {_tried(found)}.",
        remedies.describe_remedies(config, ranks, dims),
    ]
    raise ConfigError([Problem("run.parallelism", " ".join(sentences))])


def _plan_given(config: RunConfig, ranks: Ranks, dims: Dims | None) -> LayoutPlan:
    problems = list(layout_checks.check(config, ranks.world_size, dims, allow_uneven=ranks.allow_uneven))
    if problems:
        raise ConfigError(Problem(f"run.{problem.field}", problem.message) for problem in problems)
    made = LayoutPlan(config, mesh.shape_of(config, ranks.world_size, dims), None)
    made = LayoutPlan(config, made.shape, estimate_of(config, made.shape, made.micro))
    if made.footprint is None:
        return made
    found = find(config, ranks, dims)
    advice = [] if isinstance(found, LayoutPlan) else [remedies.describe_remedies(config, ranks, dims)]
    return LayoutPlan(config, made.shape, made.footprint, [made.memory_text(ranks), *advice])


def _tried(refusals: list[LayoutRefusal]) -> str:
    too_large = [refusal for refusal in refusals if refusal.needs is not None]
    if len(too_large) <= MAX_LISTED:
        return "; ".join(map(str, refusals))
    smallest = min(too_large, key=lambda refusal: refusal.needs or 0)
    others = [str(refusal) for refusal in refusals if refusal.needs is None]
    count = len(too_large) - 1
    return "; ".join(
        [str(too_large[0]), *others, f"{count} more layouts need at least {size_text(smallest.needs or 0)}"]
    )
