"""Settings that may prevent a layout, what each could be instead, and in order of what that costs."""

from __future__ import annotations

from collections.abc import Iterator

from training.config import choices, mesh
from training.config import shape as shapes
from training.config.communication import PLAIN, sync_interval
from training.config.run_config import RunConfig
from training.planning.changes import Change
from training.planning.layouts import Ranks

RECOMPUTED = ("none", "selective", "full")


def memory_savings(config: RunConfig, ranks: Ranks) -> Iterator[Change]:
    """Yield changes that save memory: first those that do not affect the run's numbers, and of these the fastest."""
    smaller = _smaller_micro_batches(config, ranks)
    layouts: list[Change] = [{"parallelism": shapes.AUTO}] if config.parallelism != shapes.AUTO else []
    yield from smaller
    yield from layouts
    # Auto also chooses the micro-batch if none is configured.
    base = layouts[0] if layouts else smaller[-1] if smaller else {}
    for recomputation in _recomputations(config):
        yield recomputation
        if base:
            yield {**base, **recomputation}
    for kind in _types(config):
        yield kind
        for recomputation in _recomputations(config):
            yield {**base, **kind, **recomputation}


def all_memory_savings(config: RunConfig, ranks: Ranks) -> Change:
    """Return all changes that save memory except offload, combined."""
    changes = [*_smaller_micro_batches(config, ranks)[-1:], *_recomputations(config)[-1:], *_types(config)]
    return {path: value for change in changes for path, value in change.items()}


def without_restrictions(config: RunConfig, ranks: Ranks) -> Change:
    """Return a change that removes everything that may prevent a layout, most dispensable settings last."""
    return dict(_removals(config, ranks))


def without_size_options(config: RunConfig) -> Change:
    """Return a change that removes the recipe's size options.

    For sizes that do not fit together, or adapters without weights.
    """
    defaults = choices.get("recipes", config.recipe).with_defaults({})
    given = config.recipe_options().items()
    return {f"{config.recipe}.{name}": None for name, value in given if value != defaults.get(name)}


def divisible_batch(ranks: Ranks) -> int:
    """Return a global batch that divides over the ranks for any mesh and schedule, with enough micro-batches."""
    return 2 * ranks.world_size


def _removals(config: RunConfig, ranks: Ranks) -> Iterator[tuple[str, object]]:
    yield "global_batch", divisible_batch(ranks)
    if config.communication != PLAIN:
        yield "communication", PLAIN
    if config.dtype in ("fp16", "fp8"):
        yield "dtype", "bf16"
    if config.warmup_steps >= config.steps:
        yield "warmup_steps", max(1, config.steps // 10)
    if config.keep_best and (interval := sync_interval(config)) and config.validate_every % interval:
        yield "validate_every", -(-config.validate_every // interval) * interval
    if config.compile:
        yield "compile", False
    if config.options_of("pipeline"):
        yield "pipeline", None
    fsdp = config.options_of("fsdp")
    if fsdp.get("reshard") == "always":
        yield "fsdp.reshard", "auto"
    if fsdp.get("dtype") == "fp16":
        yield "fsdp.dtype", "bf16"
    for axis in config.mesh:
        yield f"mesh.{axis}", None
    if config.micro_batch:
        yield "micro_batch", None


def _recomputations(config: RunConfig) -> list[Change]:
    return [{"recompute": how} for how in RECOMPUTED[RECOMPUTED.index(config.recompute) + 1 :]]


def _types(config: RunConfig) -> list[Change]:
    return [{"dtype": "bf16"}] if config.dtype == "fp32" else []


def _smaller_micro_batches(config: RunConfig, ranks: Ranks) -> list[Change]:
    """Return changes to smaller micro-batches.

    With auto only the removal of a configured one, as it finds the largest.
    """
    if config.parallelism == shapes.AUTO:
        return [{"micro_batch": None}] if config.micro_batch else []
    now = config.micro_batch or mesh.shape_of(config, ranks.world_size).share
    sizes = [1 << power for power in range(now.bit_length() - 1, -1, -1)]
    return [{"micro_batch": size} for size in sizes if size < now]
