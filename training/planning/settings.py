"""Settings that may stand in a run's way, and what each could be instead, with what that costs."""

from __future__ import annotations

from collections.abc import Iterator

from training.config import choices
from training.config import shape as shapes
from training.config.communication import PLAIN, apart
from training.config.run_config import RunConfig
from training.planning.changes import Change
from training.planning.ways import Ranks

RECOMPUTED = ("none", "selective", "full")


def lighter(config: RunConfig, ranks: Ranks) -> Iterator[Change]:
    """What takes less memory: what leaves the run's numbers as they are first, and of that the fastest."""
    smaller = _smaller(config, ranks)
    layouts: list[Change] = [{"parallelism": shapes.AUTO}] if config.parallelism != shapes.AUTO else []
    yield from smaller
    yield from layouts
    # Auto finds the micro-batch, too, where none is asked for.
    base = layouts[0] if layouts else smaller[-1] if smaller else {}
    for again in _recomputations(config):
        yield again
        if base:
            yield {**base, **again}
    for kind in _types(config):
        yield kind
        for again in _recomputations(config):
            yield {**base, **kind, **again}


def lightest(config: RunConfig, ranks: Ranks) -> Change:
    """All that saves memory but offload."""
    every = [*_smaller(config, ranks)[-1:], *_recomputations(config)[-1:], *_types(config)]
    return {path: value for change in every for path, value in change.items()}


def plainest(config: RunConfig, ranks: Ranks) -> Change:
    """All that may stand in the way of every layout taken out of it, that first which a run can least do without."""
    return dict(_plain(config, ranks))


def sizes(config: RunConfig) -> Change:
    """What was asked of the recipe, left out: sizes that don't fit together, or adapters beside no weights."""
    usual = choices.get("recipes", config.recipe).with_defaults({})
    asked = config.recipe_options().items()
    return {f"{config.recipe}.{name}": None for name, value in asked if value != usual.get(name)}


def dividing(ranks: Ranks) -> int:
    """A global batch that divides over so many ranks whatever the mesh and the schedule, in micro-batches enough."""
    return 2 * ranks.world_size


def _plain(config: RunConfig, ranks: Ranks) -> Iterator[tuple[str, object]]:
    yield "global_batch", dividing(ranks)
    if config.communication != PLAIN:
        yield "communication", PLAIN
    if config.dtype in ("fp16", "fp8"):
        yield "dtype", "bf16"
    if config.warmup_steps >= config.steps:
        yield "warmup_steps", max(1, config.steps // 10)
    if config.keep_best and (every := apart(config)) and config.validate_every % every:
        yield "validate_every", -(-config.validate_every // every) * every
    if config.compile:
        yield "compile", False
    if config.options_of("pipeline"):
        yield "pipeline", None
    sharded = config.options_of("fsdp")
    if sharded.get("reshard") == "always":
        yield "fsdp.reshard", "auto"
    if sharded.get("dtype") == "fp16":
        yield "fsdp.dtype", "bf16"
    for axis in config.mesh:
        yield f"mesh.{axis}", None
    if config.micro_batch:
        yield "micro_batch", None


def _recomputations(config: RunConfig) -> list[Change]:
    return [{"recompute": how} for how in RECOMPUTED[RECOMPUTED.index(config.recompute) + 1 :]]


def _types(config: RunConfig) -> list[Change]:
    return [{"dtype": "bf16"}] if config.dtype == "fp32" else []


def _smaller(config: RunConfig, ranks: Ranks) -> list[Change]:
    """Micro-batches: auto finds the largest that fits, where none is asked for."""
    if config.parallelism == shapes.AUTO:
        return [{"micro_batch": None}] if config.micro_batch else []
    now = config.micro_batch or shapes.shape_of(config, ranks.world_size).share
    sizes = [1 << power for power in range(now.bit_length() - 1, -1, -1)]
    return [{"micro_batch": size} for size in sizes if size < now]
