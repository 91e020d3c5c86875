"""Chooses a run's axes by the model's size, the memory of a rank and which ranks share a node; numbers alone, no torch.

    parallelism = "auto"

It settles the mesh and the micro-batch, which change no number of the run, and no other setting: where nothing fits as
asked it says what nearest would, which it has tried (training.planning.remedies; docs/decisions/0022).
"""

from __future__ import annotations

from training.config import choices
from training.config import shape as shapes
from training.config.asked import ConfigError, Problem
from training.config.dims import Dims
from training.config.run_config import RunConfig
from training.planning import remedies
from training.planning.ways import Plan, Ranks, Refusal, estimate_of, find
from training.units import size_text

MOST_TOLD = 3
"""Ways that take more memory than there is, one by one; of more than that only the first and the least."""


@choices.held()
def plan(config: RunConfig, ranks: Ranks, dims: Dims | None = None) -> Plan:
    """Fills in what `auto` leaves open, and estimates the memory; ConfigError if nothing can work.

    `dims`: the model's sizes, once its data has told the vocabulary; else as the recipe's options give them.
    """
    if config.parallelism != shapes.AUTO:
        return _as_given(config, ranks, dims)
    found = find(config, ranks, dims)
    if isinstance(found, Plan):
        return found
    problems = {refusal.problem for refusal in found}
    if len(problems) == 1 and (only := problems.pop()).field:  # it is nothing that another layout would mend
        raise ConfigError([Problem(f"run.{only.field}", f"{only.message} {remedies.told(config, ranks, dims)}")])
    said = ["auto found no way that works.", f"Tried: {_tried(found)}.", remedies.told(config, ranks, dims)]
    raise ConfigError([Problem("run.parallelism", " ".join(said))])


def _as_given(config: RunConfig, ranks: Ranks, dims: Dims | None) -> Plan:
    problems = list(config.check(ranks.world_size, dims, lacking=ranks.lacking))
    if problems:
        raise ConfigError(Problem(f"run.{problem.field}", problem.message) for problem in problems)
    made = Plan(config, shapes.shape_of(config, ranks.world_size, dims), None)
    made = Plan(config, made.shape, estimate_of(config, made.shape, made.micro))
    if made.footprint is None:
        return made
    found = find(config, ranks, dims)
    advice = [] if isinstance(found, Plan) else [remedies.told(config, ranks, dims)]
    return Plan(config, made.shape, made.footprint, [made.room(ranks), *advice])


def _tried(refusals: list[Refusal]) -> str:
    short = [refusal for refusal in refusals if refusal.needs is not None]
    if len(short) <= MOST_TOLD:
        return "; ".join(map(str, refusals))
    least = min(short, key=lambda refusal: refusal.needs or 0)
    others = [str(refusal) for refusal in refusals if refusal.needs is None]
    count = len(short) - 1
    return "; ".join([str(short[0]), *others, f"{count} more ways need at least {size_text(least.needs or 0)}"])
