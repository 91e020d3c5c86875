"""List layouts of a run over its ranks, the cheapest exchange first, and check whether each can work; no torch.

The order: copies on all ranks, then shards within a node, within a few nodes, across all; matrices split within a
node, contexts split, both; last a pipeline across nodes. Tensor parallelism never leaves the node, as it exchanges
activations twice per block. A split context exchanges keys and values once, so it may.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from training import contracts
from training.config import choices, layout_checks
from training.config import mesh as meshes
from training.config import shape as shapes
from training.config.base import Problem
from training.config.dims import Dims
from training.config.run_config import RunConfig
from training.config.shape import Misfit, Shape
from training.parallel import fsdp, pipeline
from training.planning.changes import apply_change
from training.planning.footprint import MemoryFootprint, MemorySettings, footprint
from training.units import size_text

USABLE = 0.8
"""Usable fraction of a rank's memory. The rest is for libraries and fragmentation; besides, an estimate may be a tenth
too low, and on CPUs gathered tensors live longer than necessary."""
BUSY_TOKENS = 2048
"""A micro-batch of fewer tokens leaves a GPU partly idle; chosen only if nothing else fits."""
CONTEXT_PARTS = (2, 4, 8, 16, 32)


@dataclass(frozen=True)
class Ranks:
    """The ranks that a run is spread over."""

    world_size: int
    per_node: int
    memory_bytes: int | None
    """Memory of one rank's GPU, or its share of the main memory; None: unknown, so nothing is refused because of it."""
    allow_uneven: bool = False
    """Whether the run was made for more ranks, so that shares of the batch may be uneven."""
    on_cpu: bool = False
    """Whether a rank's memory is main memory."""

    @property
    def usable(self) -> float:
        return float("inf") if self.memory_bytes is None else USABLE * self.memory_bytes


@dataclass(frozen=True)
class LayoutPlan:
    """The configuration with its axes chosen, and why."""

    config: RunConfig
    shape: Shape
    footprint: MemoryFootprint | None
    """None if the recipe does not report its model's sizes."""
    why: list[str] = field(default_factory=list)

    def lines(self, ranks: Ranks) -> Iterator[str]:
        """Yield a description for people."""
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
        """Whether its micro-batches are large enough, or as large as the rank's whole share."""
        most = self.shape.share * (self.shape.dims.context if self.shape.dims else 1) // self.shape["cp"]
        return self.footprint is None or self.tokens >= min(BUSY_TOKENS, most)

    def memory_text(self, ranks: Ranks) -> str:
        if self.footprint is None:
            return "the model's sizes are not known yet, so memory is not estimated"
        needs = size_text(self.footprint.total)
        if ranks.memory_bytes is None:
            return f"{needs} per rank; a rank's memory is unknown"
        fits = "fits" if self.footprint.total <= ranks.usable else "does not fit"
        return f"{needs} {fits} in the {size_text(ranks.usable)} usable of {size_text(ranks.memory_bytes)}"


@dataclass(frozen=True)
class LayoutRefusal:
    """A layout that cannot work."""

    layout: str
    problem: Problem
    """Without a field if there is too little memory."""
    needs: int | None = None
    """Bytes per rank if there is too little memory."""

    def __str__(self) -> str:
        text = str(self.problem) if self.problem.field else self.problem.message
        return f"{self.layout}: no, {text.rstrip('.')}"


def find(config: RunConfig, ranks: Ranks, dims: Dims | None = None) -> LayoutPlan | list[LayoutRefusal]:
    """Return the first layout that fits, or why none does; for a given layout, whether it fits."""
    dims = dims or _dims_of(config)
    why: list[str] = []
    fitting: list[LayoutPlan] = []
    refusals: list[LayoutRefusal] = []
    for words, settings in _layouts(config, ranks, dims):
        # The first is always checked completely: a problem that no layout solves is reported as such.
        hopeless = _too_large(config, ranks, dims, words, settings) if refusals else None
        result = hopeless or _try(config, ranks, dims, words, settings)
        if isinstance(result, LayoutRefusal):
            refusals.append(result)
            why.append(str(result))
        elif result.is_busy or not settings:
            return LayoutPlan(
                result.config, result.shape, result.footprint, [*why, f"{words}: yes, {result.memory_text(ranks)}"]
            )
        else:
            fitting.append(result)
            why.append(f"{words}: fits, but only with micro-batches of {result.tokens} tokens; looking for larger ones")
    if not fitting:
        return refusals
    return LayoutPlan(
        fitting[0].config, fitting[0].shape, fitting[0].footprint, [*why, "the first one that fits is chosen"]
    )


def least_memory(config: RunConfig, ranks: Ranks, dims: Dims | None = None) -> int | None:
    """Return the memory of a rank in bytes below which no layout works; None: none works, or it is unknown."""
    dims = dims or _dims_of(config)
    needs = []
    for words, settings in _layouts(config, ranks, dims):
        refusal = _too_large(config, replace(ranks, memory_bytes=0), dims, words, settings)
        if refusal is not None and refusal.needs is not None:
            needs.append((refusal.needs, words, settings))
    for least, words, settings in sorted(needs, key=lambda entry: entry[0]):
        memory = math.ceil(least / USABLE)
        if isinstance(_try(config, replace(ranks, memory_bytes=memory), dims, words, settings), LayoutPlan):
            return memory
    return None


def batches(config: RunConfig, ranks: Ranks, dims: Dims | None = None) -> list[int]:
    """Return global batches that some layout divides, the nearest first."""
    micro, configured = config.micro_batch or 1, config.global_batch
    sizes = set()
    for _, settings in _layouts(config, ranks, dims or _dims_of(config)):
        try:
            shape = meshes.shape_of(config.model_copy(update=settings), ranks.world_size, dims)
        except Misfit:
            continue
        # For a pipeline also as many micro-batches as it has stages.
        for unit in {shape.coordinates * micro, shape.coordinates * micro * shape["pp"]}:
            sizes |= {configured // unit * unit, (configured // unit + 1) * unit}
    return sorted(sizes - {0, configured}, key=lambda size: abs(size - configured))


def _layouts(config: RunConfig, ranks: Ranks, dims: Dims | None) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each layout in words with the fields that it sets; none for a given layout."""
    if config.parallelism != shapes.AUTO:
        yield "as it is", {}
        return
    for mesh, parallelism, words in _auto_layouts(config, ranks, dims):
        yield words, {"parallelism": parallelism, "mesh": mesh}


def _auto_layouts(config: RunConfig, ranks: Ranks, dims: Dims | None) -> Iterator[tuple[dict[str, int], str, str]]:
    """Yield (mesh, parallelism, description), the cheapest exchange first. Axes that the run sets are preserved."""
    given = dict(config.mesh)
    others = [axis for axis in given if axis not in shapes.DATA_AXES]
    along = f" with {', '.join(others)}" if others else ""
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
    fits = [count for count in CONTEXT_PARTS if _is_worth_splitting(context, count) and ranks.world_size % count == 0]
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
    """Return the tokens per sample; 0: unknown, or the model's sizes are refused anyway."""
    dims_known = dims or _dims_of(config)
    return dims_known.context if dims_known else 0


def _dims_of(config: RunConfig) -> Dims | None:
    """Return the model's sizes; None also where they are refused, as shape_of reports that for each layout."""
    try:
        return meshes.dims_of(config)
    except Misfit:
        return None


def _is_worth_splitting(context: int, count: int) -> bool:
    """Return whether this many parts of a context keep their GPUs busy."""
    return context // count >= BUSY_TOKENS and context % (2 * count) == 0


def _try(
    config: RunConfig, ranks: Ranks, dims: Dims | None, layout: str, settings: dict[str, Any]
) -> LayoutPlan | LayoutRefusal:
    """Return the plan with the largest micro-batch that fits, or why it cannot work.

    `settings`: empty for a given layout.
    """
    try:
        shape = meshes.shape_of(config.model_copy(update=settings), ranks.world_size, dims)
    except Misfit as misfit:
        return LayoutRefusal(layout, Problem(misfit.field, str(misfit)))
    config_laid_out = _apply_layout(config, settings) if settings else config
    # Check the configuration itself before trying other micro-batches.
    problem_found = next(_problems(config_laid_out, ranks, dims), None)
    if problem_found is not None:
        return LayoutRefusal(layout, problem_found)
    micro_batch = config.micro_batch or (None if settings else next(_micro_batches(config_laid_out, shape)))
    for micro in [micro_batch] if micro_batch else _micro_batches(config_laid_out, shape):
        estimate = estimate_of(config_laid_out, shape, micro)
        if estimate is not None and estimate.total > ranks.usable:
            continue
        candidate = config_laid_out.model_copy(update={"micro_batch": micro}) if settings else config_laid_out
        problem = next(_problems(candidate, ranks, dims), None)
        if problem is None:
            return LayoutPlan(
                apply_change(config, {**settings, "micro_batch": micro}) if settings else config, shape, estimate
            )
        problem_found = problem_found or problem
    return (
        LayoutRefusal(layout, problem_found)
        if problem_found is not None
        else _memory_refusal(config_laid_out, ranks, shape, layout, micro_batch or 1)
    )


def _too_large(
    config: RunConfig, ranks: Ranks, dims: Dims | None, layout: str, settings: dict[str, Any]
) -> LayoutRefusal | None:
    """Return a refusal if not even single samples fit: ten times as fast as checking a configuration."""
    rough = config.model_copy(update=settings)
    try:
        found = meshes.shape_of(rough, ranks.world_size, dims)
    except Misfit:
        return None
    refusal = _memory_refusal(rough, ranks, found, layout, config.micro_batch or 1)
    return refusal if (refusal.needs or 0) > ranks.usable else None


def _memory_refusal(config: RunConfig, ranks: Ranks, shape: Shape, layout: str, micro: int) -> LayoutRefusal:
    """Return the refusal for lack of memory. `micro`: the smallest possible micro-batch."""
    smallest = estimate_of(config, shape, micro)
    needs = smallest.total if smallest else 0
    return LayoutRefusal(layout, Problem("", f"{size_text(needs)} of {size_text(ranks.usable)} usable"), needs)


def _problems(config: RunConfig, ranks: Ranks, dims: Dims | None) -> Iterator[Problem]:
    return layout_checks.check(config, ranks.world_size, dims, allow_uneven=ranks.allow_uneven)


def estimate_of(config: RunConfig, shape: Shape, micro: int) -> MemoryFootprint | None:
    """Return the memory of a rank; None if the recipe does not report its model's sizes."""
    if shape.dims is None:
        return None
    pipe, split = _options(config, "pipeline"), _options(config, "tensor")
    # Options for what auto may choose do not apply to other layouts.
    sharded = _options(config, "fsdp") if config.parallelism == "fsdp" else {}
    settings = MemorySettings(
        parallelism=config.parallelism,
        micro_batch=micro,
        micro_batches=max(1, shape.share // micro),
        dtype=str(sharded.get("dtype") or config.dtype),
        recompute=config.recompute,
        reshard=fsdp.reshards(sharded.get("reshard", "auto"), has_pipeline=shape["pp"] > 1),
        offload=bool(sharded.get("offload", False)),
        compile=config.compile,
        loss_parallel=bool(split.get("loss_parallel", True)),
        schedule=str(pipe["schedule"]) if shape["pp"] > 1 else None,
        exchange_bytes=contracts.communication(config.communication).extra_bytes_per_parameter(
            **config.options_of(config.communication)
        ),
    )
    return footprint(shape.dims, shape, settings)


def _options(config: RunConfig, name: str) -> dict[str, choices.Value]:
    return choices.get("parallel", name).with_defaults(config.options_of(name))


def _apply_layout(config: RunConfig, settings: dict[str, Any]) -> RunConfig:
    """Do what apply_change does without validation, in a tenth of the time: the settings chosen here are valid."""
    used = shapes.modules_by_axis(settings["parallelism"], settings["mesh"]).values()
    others = {name: options for name, options in config.options.items() if name not in choices.names("parallel")}
    options = {**others, **{name: filled for name in used if (filled := _options(config, name))}}
    return config.model_copy(update={**settings, "options": options})


def _micro_batches(config: RunConfig, shape: Shape) -> Iterator[int]:
    """Yield the divisors of a rank's share, from the whole share down to single samples."""
    share = shape.share
    if shape["pp"] > 1:
        schedule = str(config.options_of("pipeline").get("schedule", "1F1B"))
        share //= pipeline.micro_batches(share, shape, schedule=schedule)
    yield from reversed(shapes.divisors(share))
