"""Chooses a run's axes by the model's size, the memory of a rank and which ranks share a node; numbers alone, no torch.

    parallelism = "auto"

Ways are tried in the order of what they exchange: copies need least, then shards within a node, shards across all,
matrices split within a node, and last a pipeline across nodes. The first that fits is taken. Tensor parallelism never
leaves the node: it exchanges activations twice a block.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from training import choices, contracts
from training import shape as shapes
from training.config import ConfigError, Problem, RunConfig
from training.dims import Dims
from training.parallel import fsdp, pipeline
from training.planning.footprint import Footprint, Settings, footprint
from training.shape import Shape
from training.units import size_text

USABLE = 0.8
"""Of a rank's memory: the rest is the library's, and what allocators lose between blocks; besides, an estimate may be a
tenth too low, and on CPUs gathered tensors live longer than they need to."""
USABLE_WORD = "usable"
"""The last word about a way that takes more memory than there is."""
BUSY_TOKENS = 2048
"""A micro-batch of fewer leaves a GPU idle; taken only where nothing else fits."""


@dataclass(frozen=True)
class Ranks:
    """What a run is spread over."""

    world_size: int
    per_node: int
    memory_bytes: int | None
    """Of one rank's GPU, or its part of the main memory; None: not known, so nothing is refused for it."""
    lacking: bool = False
    """They are fewer than the run was made for: shares of the batch may be uneven."""


@dataclass(frozen=True)
class Plan:
    """The configuration with its axes chosen, and why."""

    config: RunConfig
    shape: Shape
    footprint: Footprint | None
    """None where the recipe does not tell its model's sizes."""
    why: list[str] = field(default_factory=list)

    def lines(self, ranks: Ranks) -> Iterator[str]:
        """For a person."""
        mesh = str(self.shape)
        count = f"{ranks.world_size} rank{'s' * (ranks.world_size > 1)}"
        yield f"{self.config.parallelism} on {count}: {mesh}, micro-batch {_micro(self)}"
        if self.footprint is not None:
            yield f"a rank, at its peak: {self.footprint}"
        yield from self.why


def plan(config: RunConfig, ranks: Ranks, dims: Dims | None = None) -> Plan:
    """Fills in what `auto` leaves open, and estimates the memory; ConfigError if nothing can work.

    `dims`: the model's sizes, once its data has told the vocabulary; else as the recipe's options give them.
    """
    if config.parallelism != shapes.AUTO:
        return _as_given(config, ranks, dims)
    why: list[str] = []
    fitting: list[Plan] = []
    refusals: list[Problem] = []
    for mesh, parallelism, words in _ways(config, ranks):
        made = _try(config, ranks, dims, {"parallelism": parallelism, "mesh": mesh})
        if isinstance(made, Problem):
            refusals.append(made)
            said = str(made) if made.field else made.message
            why.append(f"{words}: no, {said.rstrip('.')}")
            continue
        is_busy = made.footprint is None or _tokens(made) >= min(BUSY_TOKENS, _whole_share(made))
        if is_busy:
            return Plan(made.config, made.shape, made.footprint, [*why, f"{words}: yes, {_room(made, ranks)}"])
        fitting.append(made)
        why.append(f"{words}: fits, but only with micro-batches of {_tokens(made)} tokens; larger ones are sought")
    if fitting:
        return Plan(fitting[0].config, fitting[0].shape, fitting[0].footprint, [*why, "the first that fits is taken"])
    if len(set(refusals)) == 1 and refusals[0].field:  # it is nothing that another layout would mend
        raise ConfigError([Problem(f"run.{refusals[0].field}", refusals[0].message)])
    raise ConfigError([Problem("run.parallelism", "auto found no way that works. " + _remedy(why, config))])


def _as_given(config: RunConfig, ranks: Ranks, dims: Dims | None) -> Plan:
    problems = list(config.check(ranks.world_size, dims, lacking=ranks.lacking))
    if problems:
        raise ConfigError(Problem(f"run.{problem.field}", problem.message) for problem in problems)
    found = shapes.shape_of(config, ranks.world_size, dims)
    estimate = estimate_of(config, found, _fixed_micro(config, found))
    said = [] if estimate is None else [_fits(estimate, ranks)]
    return Plan(config, found, estimate, said)


def _ways(config: RunConfig, ranks: Ranks) -> Iterator[tuple[dict[str, int], str, str]]:
    """(mesh, parallelism, in words), the cheapest exchange first. Axes that the run gives are kept."""
    given = dict(config.mesh)
    others = [axis for axis in given if axis not in shapes.DATA_AXES]
    along = f" beside {', '.join(others)}" if others else ""
    if "shard" not in given:
        yield given, "ddp", f"copies{along} (ddp)" if along else "a copy on each rank (ddp)"
    nodes = max(1, ranks.world_size // ranks.per_node)
    if nodes > 1 and ranks.per_node > 1 and not given:
        yield {"dp": nodes, "shard": ranks.per_node}, "fsdp", "shards within a node, copies across (fsdp, dp × shard)"
    yield given, "fsdp", f"shards across all ranks{along} (fsdp)"
    splits = [] if "tp" in given else [size for size in (2, 4, 8) if ranks.per_node % size == 0]
    for split in splits:
        yield {**given, "tp": split}, "fsdp", f"matrices split over {split} ranks of a node, shards across (fsdp × tp)"
    for stages in [] if "pp" in given else [count for count in (2, 4, 8, 16) if nodes % count == 0]:
        for split in splits or [given.get("tp", 1)]:
            mesh = {**given, "pp": stages, **({"tp": split} if split > 1 else {})}
            yield mesh, "fsdp", f"{stages} stages across nodes, matrices over {split}, shards (pp × fsdp × tp)"


def _try(config: RunConfig, ranks: Ranks, dims: Dims | None, chosen: dict[str, Any]) -> Plan | Problem:
    """The way with the largest micro-batch that fits, or why it can't work: of no field, where memory is short."""
    settled = _with(config, chosen)
    try:
        found = shapes.shape_of(settled, ranks.world_size, dims)
    except shapes.Misfit as misfit:
        return Problem(misfit.field, str(misfit))
    # Of what was asked, before micro-batches are tried that nobody asked for.
    refused = next(settled.check(ranks.world_size, dims, lacking=ranks.lacking), None)
    if refused is not None:
        return refused
    least: Footprint | None = None
    for micro in [config.micro_batch] if config.micro_batch else _micro_batches(config, found):
        made = _with(settled, {"micro_batch": micro})
        problems = list(made.check(ranks.world_size, dims, lacking=ranks.lacking))
        if problems:
            refused = refused or problems[0]
            continue
        estimate = estimate_of(made, found, micro)
        if estimate is None or ranks.memory_bytes is None or estimate.total <= USABLE * ranks.memory_bytes:
            return Plan(made, found, estimate)
        least = estimate
    if least is None:
        assert refused is not None
        return refused
    assert ranks.memory_bytes is not None
    return Problem("", f"{size_text(least.total)} of {size_text(USABLE * ranks.memory_bytes)} {USABLE_WORD}")


def estimate_of(config: RunConfig, shape: Shape, micro: int) -> Footprint | None:
    """The memory of a rank; None where the recipe does not tell its model's sizes."""
    if shape.dims is None:
        return None
    sharded, pipe, split = (config.options_of(name) for name in ("fsdp", "pipeline", "tensor"))
    settings = Settings(
        parallelism=config.parallelism,
        micro_batch=micro,
        micro_batches=max(1, shape.share // micro),
        dtype=str(sharded.get("dtype") or config.dtype),
        recompute=config.recompute,
        reshard=fsdp.lets_go(sharded.get("reshard", "auto"), is_piped=shape["pp"] > 1),
        offload=bool(sharded.get("offload", False)),
        loss_parallel=bool(split.get("loss_parallel", True)),
        schedule=str(pipe["schedule"]) if "schedule" in pipe else None,
        exchange_bytes=contracts.communication(config.communication).keeps(**config.options_of(config.communication)),
    )
    return footprint(shape.dims, shape, settings)


def _with(config: RunConfig, changes: dict[str, Any]) -> RunConfig:
    """With these fields, and without the options of parallelisms that are out of use with them."""
    data = {**config.model_dump(), **changes}
    used = set(shapes.owners(data["parallelism"], data.get("mesh", {})).values())
    unused = [name for name in choices.names("parallel") if name in data and name not in used]
    return RunConfig.model_validate({name: value for name, value in data.items() if name not in unused})


def _micro_batches(config: RunConfig, shape: Shape) -> Iterator[int]:
    """From a rank's whole share down to single samples, as they divide it."""
    share = shape.share
    if shape["pp"] > 1:
        schedule = str(config.options_of("pipeline").get("schedule", "1F1B"))
        share //= pipeline.micro_batches(share, shape, schedule=schedule)
    for pieces in range(1, share + 1):
        if share % pieces == 0:
            yield share // pieces


def _fixed_micro(config: RunConfig, shape: Shape) -> int:
    return config.micro_batch or next(_micro_batches(config, shape))


def _micro(plan: Plan) -> int:
    return _fixed_micro(plan.config, plan.shape)


def _tokens(plan: Plan) -> int:
    return _micro(plan) * (plan.shape.dims.context if plan.shape.dims else 1)


def _whole_share(plan: Plan) -> int:
    """Tokens of a rank's whole share: a small run has no larger micro-batches to offer."""
    return plan.shape.share * (plan.shape.dims.context if plan.shape.dims else 1)


def _room(plan: Plan, ranks: Ranks) -> str:
    if plan.footprint is None:
        return "the model's sizes are not known yet, so memory is not estimated"
    return _fits(plan.footprint, ranks)


def _fits(estimate: Footprint, ranks: Ranks) -> str:
    if ranks.memory_bytes is None:
        return f"{size_text(estimate.total)} a rank; how much a rank has is not known"
    usable = USABLE * ranks.memory_bytes
    verdict = "fits" if estimate.total <= usable else "does not fit"
    room = f"the {size_text(usable)} usable of {size_text(ranks.memory_bytes)}"
    return f"{size_text(estimate.total)} {verdict} in {room}"


def _remedy(why: list[str], config: RunConfig) -> str:
    tried = "; ".join(why)
    is_short = any(words.endswith(USABLE_WORD) for words in why)
    advice = ' Try recompute = "full".' if is_short and config.recompute != "full" else ""
    return f"Tried: {tried}.{advice}"
