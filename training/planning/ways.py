"""Ways to lay a run out over its ranks, the cheapest exchange first, and whether each can work; no torch.

Copies need least, then shards within a node, within a few nodes, across all; matrices split within a node, contexts
split, both; last a pipeline across nodes. Tensor parallelism never leaves the node: it exchanges activations twice a
block. A split context exchanges keys and values once, so it may.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from training import contracts
from training.config import choices
from training.config import shape as shapes
from training.config.asked import Problem
from training.config.dims import Dims
from training.config.run_config import RunConfig
from training.config.shape import Misfit, Shape
from training.parallel import fsdp, pipeline
from training.planning.changes import changed
from training.planning.footprint import Footprint, Settings, footprint
from training.units import size_text

USABLE = 0.8
"""Of a rank's memory: the rest is the library's, and what allocators lose between blocks; besides, an estimate may be
a tenth too low, and on CPUs gathered tensors live longer than they need to."""
BUSY_TOKENS = 2048
"""A micro-batch of fewer leaves a GPU idle; taken only where nothing else fits."""
CONTEXT_PARTS = (2, 4, 8, 16, 32)


@dataclass(frozen=True)
class Ranks:
    """What a run is spread over."""

    world_size: int
    per_node: int
    memory_bytes: int | None
    """Of one rank's GPU, or its part of the main memory; None: not known, so nothing is refused for it."""
    lacking: bool = False
    """They are fewer than the run was made for: shares of the batch may be uneven."""
    on_cpu: bool = False
    """The memory of a rank is main memory already."""

    @property
    def usable(self) -> float:
        return float("inf") if self.memory_bytes is None else USABLE * self.memory_bytes


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
        count = f"{ranks.world_size} rank{'s' * (ranks.world_size > 1)}"
        yield f"{self.config.parallelism} on {count}: {self.shape}, micro-batch {self.micro}"
        if self.footprint is not None:
            yield f"a rank, at its peak: {self.footprint}"
        yield from self.why

    @property
    def micro(self) -> int:
        return self.config.micro_batch or next(_micro_batches(self.config, self.shape))

    @property
    def tokens(self) -> int:
        return self.micro * (self.shape.dims.context if self.shape.dims else 1) // self.shape["cp"]

    @property
    def is_busy(self) -> bool:
        """A small run has no larger micro-batches to offer than its whole share."""
        whole = self.shape.share * (self.shape.dims.context if self.shape.dims else 1) // self.shape["cp"]
        return self.footprint is None or self.tokens >= min(BUSY_TOKENS, whole)

    def room(self, ranks: Ranks) -> str:
        if self.footprint is None:
            return "the model's sizes are not known yet, so memory is not estimated"
        needs = size_text(self.footprint.total)
        if ranks.memory_bytes is None:
            return f"{needs} a rank; how much a rank has is not known"
        fits = "fits" if self.footprint.total <= ranks.usable else "does not fit"
        return f"{needs} {fits} in the {size_text(ranks.usable)} usable of {size_text(ranks.memory_bytes)}"


@dataclass(frozen=True)
class Refusal:
    """A way that can't work."""

    way: str
    problem: Problem
    """Of no field, where memory is short."""
    needs: int | None = None
    """Bytes a rank, where memory is short."""

    def __str__(self) -> str:
        said = str(self.problem) if self.problem.field else self.problem.message
        return f"{self.way}: no, {said.rstrip('.')}"


def find(config: RunConfig, ranks: Ranks, dims: Dims | None = None) -> Plan | list[Refusal]:
    """The first way that fits, or why none does; of a layout that is given, whether it fits."""
    dims = dims or _dims_of(config)
    why: list[str] = []
    fitting: list[Plan] = []
    refusals: list[Refusal] = []
    for words, chosen in _layouts(config, ranks, dims):
        # The first is checked in any case: what no layout would mend is to be told as such.
        hopeless = _hopeless(config, ranks, dims, words, chosen) if refusals else None
        made = hopeless or _try(config, ranks, dims, words, chosen)
        if isinstance(made, Refusal):
            refusals.append(made)
            why.append(str(made))
        elif made.is_busy or not chosen:
            return Plan(made.config, made.shape, made.footprint, [*why, f"{words}: yes, {made.room(ranks)}"])
        else:
            fitting.append(made)
            why.append(f"{words}: fits, but only with micro-batches of {made.tokens} tokens; larger ones are sought")
    if not fitting:
        return refusals
    return Plan(fitting[0].config, fitting[0].shape, fitting[0].footprint, [*why, "the first that fits is taken"])


def least_memory(config: RunConfig, ranks: Ranks, dims: Dims | None = None) -> int | None:
    """Bytes of a rank's memory below which no way works; None: none does, or nobody knows."""
    dims = dims or _dims_of(config)
    needs = []
    for words, chosen in _layouts(config, ranks, dims):
        short = _hopeless(config, replace(ranks, memory_bytes=0), dims, words, chosen)
        if short is not None and short.needs is not None:
            needs.append((short.needs, words, chosen))
    for least, words, chosen in sorted(needs, key=lambda one: one[0]):
        memory = math.ceil(least / USABLE)
        if isinstance(_try(config, replace(ranks, memory_bytes=memory), dims, words, chosen), Plan):
            return memory
    return None


def batches(config: RunConfig, ranks: Ranks, dims: Dims | None = None) -> list[int]:
    """Global batches that some way divides, the nearest first."""
    micro, asked = config.micro_batch or 1, config.global_batch
    found = set()
    for _, chosen in _layouts(config, ranks, dims or _dims_of(config)):
        try:
            shape = shapes.shape_of(config.model_copy(update=chosen), ranks.world_size, dims)
        except Misfit:
            continue
        # Of a pipeline as many micro-batches as it has stages.
        for unit in {shape.coordinates * micro, shape.coordinates * micro * shape["pp"]}:
            found |= {asked // unit * unit, (asked // unit + 1) * unit}
    return sorted(found - {0, asked}, key=lambda size: abs(size - asked))


def _layouts(config: RunConfig, ranks: Ranks, dims: Dims | None) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each way in words, and the fields that it settles; of a layout that is given none."""
    if config.parallelism != shapes.AUTO:
        yield "as it is", {}
        return
    for mesh, parallelism, words in _ways(config, ranks, dims):
        yield words, {"parallelism": parallelism, "mesh": mesh}


def _ways(config: RunConfig, ranks: Ranks, dims: Dims | None) -> Iterator[tuple[dict[str, int], str, str]]:
    """(mesh, parallelism, in words), the cheapest exchange first. Axes that the run gives are kept."""
    given = dict(config.mesh)
    others = [axis for axis in given if axis not in shapes.DATA_AXES]
    along = f" beside {', '.join(others)}" if others else ""
    if "shard" not in given:
        yield given, "ddp", f"copies{along} (ddp)" if along else "a copy on each rank (ddp)"
    nodes = max(1, ranks.world_size // ranks.per_node)
    if not given:
        yield from _copies_of_shards(nodes, ranks.per_node)
    yield given, "fsdp", f"shards across all ranks{along} (fsdp)"
    splits = [] if "tp" in given else [size for size in (2, 4, 8) if ranks.per_node % size == 0]
    for split in splits:
        yield {**given, "tp": split}, "fsdp", f"matrices split over {split} ranks of a node, shards across (fsdp × tp)"
    context = context_of(config, dims)
    fits = [count for count in CONTEXT_PARTS if _falls_into(context, count) and ranks.world_size % count == 0]
    parts = [] if "cp" in given else fits
    for count in parts:
        yield {**given, "cp": count}, "fsdp", f"contexts split over {count} ranks, shards across (fsdp × cp)"
    for count in parts if splits else ():
        if ranks.world_size % (count * splits[-1]):
            continue
        mesh = {**given, "cp": count, "tp": splits[-1]}
        yield mesh, "fsdp", f"contexts split over {count} ranks, matrices over {splits[-1]}, shards (fsdp × cp × tp)"
    for stages in [] if "pp" in given else [count for count in (2, 4, 8, 16) if nodes % count == 0]:
        for split in splits or [given.get("tp", 1)]:
            mesh = {**given, "pp": stages, **({"tp": split} if split > 1 else {})}
            yield mesh, "fsdp", f"{stages} stages across nodes, matrices over {split}, shards (pp × fsdp × tp)"


def _copies_of_shards(nodes: int, per_node: int) -> Iterator[tuple[dict[str, int], str, str]]:
    for group in (1, 2, 4, 8, 16, 32):
        if group < nodes and nodes % group == 0 and group * per_node > 1:
            within = "a node" if group == 1 else f"{group} nodes"
            mesh = {"dp": nodes // group, "shard": group * per_node}
            yield mesh, "fsdp", f"shards within {within}, copies across (fsdp, dp × shard)"


def context_of(config: RunConfig, dims: Dims | None) -> int:
    """Tokens of a sample; 0: not known, or the model's sizes are refused anyway."""
    known = dims or _dims_of(config)
    return known.context if known else 0


def _dims_of(config: RunConfig) -> Dims | None:
    """None, too, where they are refused: shape_of says so for each way."""
    try:
        return shapes.dims_of(config)
    except Misfit:
        return None


def _falls_into(context: int, count: int) -> bool:
    """Whether so many parts keep their GPUs busy."""
    return context // count >= BUSY_TOKENS and context % (2 * count) == 0


def _try(config: RunConfig, ranks: Ranks, dims: Dims | None, way: str, chosen: dict[str, Any]) -> Plan | Refusal:
    """With the largest micro-batch that fits, or why it can't work. `chosen`: nothing of a layout that is given."""
    try:
        found = shapes.shape_of(config.model_copy(update=chosen), ranks.world_size, dims)
    except Misfit as misfit:
        return Refusal(way, Problem(misfit.field, str(misfit)))
    settled = _laid_out(config, chosen) if chosen else config
    # Of what was asked, before micro-batches are tried that nobody asked for.
    refused = next(_problems(settled, ranks, dims), None)
    if refused is not None:
        return Refusal(way, refused)
    asked = config.micro_batch or (None if chosen else next(_micro_batches(settled, found)))
    for micro in [asked] if asked else _micro_batches(settled, found):
        estimate = estimate_of(settled, found, micro)
        if estimate is not None and estimate.total > ranks.usable:
            continue
        made = settled.model_copy(update={"micro_batch": micro}) if chosen else settled
        problem = next(_problems(made, ranks, dims), None)
        if problem is None:
            return Plan(changed(config, {**chosen, "micro_batch": micro}) if chosen else config, found, estimate)
        refused = refused or problem
    return Refusal(way, refused) if refused is not None else _short(settled, ranks, found, way, asked or 1)


def _hopeless(config: RunConfig, ranks: Ranks, dims: Dims | None, way: str, chosen: dict[str, Any]) -> Refusal | None:
    """Where not even single samples fit: known in a tenth of the time that it takes to check a configuration."""
    rough = config.model_copy(update=chosen)
    try:
        found = shapes.shape_of(rough, ranks.world_size, dims)
    except Misfit:
        return None
    short = _short(rough, ranks, found, way, config.micro_batch or 1)
    return short if (short.needs or 0) > ranks.usable else None


def _short(config: RunConfig, ranks: Ranks, shape: Shape, way: str, micro: int) -> Refusal:
    """`micro`: the smallest that it may have."""
    least = estimate_of(config, shape, micro)
    needs = least.total if least else 0
    return Refusal(way, Problem("", f"{size_text(needs)} of {size_text(ranks.usable)} usable"), needs)


def _problems(config: RunConfig, ranks: Ranks, dims: Dims | None) -> Iterator[Problem]:
    return config.check(ranks.world_size, dims, lacking=ranks.lacking)


def estimate_of(config: RunConfig, shape: Shape, micro: int) -> Footprint | None:
    """The memory of a rank; None where the recipe does not tell its model's sizes."""
    if shape.dims is None:
        return None
    pipe, split = _options(config, "pipeline"), _options(config, "tensor")
    # A table for what auto may choose is no table of the way that is estimated.
    sharded = _options(config, "fsdp") if config.parallelism == "fsdp" else {}
    settings = Settings(
        parallelism=config.parallelism,
        micro_batch=micro,
        micro_batches=max(1, shape.share // micro),
        dtype=str(sharded.get("dtype") or config.dtype),
        recompute=config.recompute,
        reshard=fsdp.lets_go(sharded.get("reshard", "auto"), is_piped=shape["pp"] > 1),
        offload=bool(sharded.get("offload", False)),
        compile=config.compile,
        loss_parallel=bool(split.get("loss_parallel", True)),
        schedule=str(pipe["schedule"]) if shape["pp"] > 1 else None,
        exchange_bytes=contracts.communication(config.communication).keeps(**config.options_of(config.communication)),
    )
    return footprint(shape.dims, shape, settings)


def _options(config: RunConfig, name: str) -> dict[str, choices.Value]:
    return choices.get("parallel", name).with_defaults(config.options_of(name))


def _laid_out(config: RunConfig, chosen: dict[str, Any]) -> RunConfig:
    """As `changed` makes it, but unvalidated, which takes a tenth of the time: what is chosen here is valid."""
    used = shapes.owners(chosen["parallelism"], chosen["mesh"]).values()
    others = {name: options for name, options in config.options.items() if name not in choices.names("parallel")}
    options = {**others, **{name: filled for name in used if (filled := _options(config, name))}}
    return config.model_copy(update={**chosen, "options": options})


def _micro_batches(config: RunConfig, shape: Shape) -> Iterator[int]:
    """From a rank's whole share down to single samples, as they divide it."""
    share = shape.share
    if shape["pp"] > 1:
        schedule = str(config.options_of("pipeline").get("schedule", "1F1B"))
        share //= pipeline.micro_batches(share, shape, schedule=schedule)
    yield from reversed(shapes.divisors(share))
