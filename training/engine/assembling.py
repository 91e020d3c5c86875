"""What a run trains with: its data, its model over the ranks, its optimizer, made from the configuration."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from training import contracts
from training.attempt.heartbeat import Heartbeat, NullHeartbeat
from training.attempt.place import Place
from training.config import choices, communication, shape
from training.config.asked import ConfigError, Problem
from training.config.dims import Dims
from training.config.run_config import RunConfig
from training.corpus.cache import cache_dir
from training.data import Prepared, Task
from training.engine.composing import Composed
from training.loader import supply
from training.loader.feeding import Feed
from training.loader.order import Loader, Order, Share
from training.manifest import Manifest
from training.planning import checking
from training.planning.plan import plan
from training.planning.ways import Plan, Ranks
from training.reporting.reporter import AnyReporter
from training.runtime.distributed import World, broadcast
from training.runtime.seeds import derive_seed
from training.step import meshes
from training.step.optimizer import Optimizer
from training.weights import origin
from training.weights.base import Base


@dataclass(frozen=True, kw_only=True)
class Assembly:
    """What one rank trains with."""

    config: RunConfig
    """The configuration, with the axes that were chosen where it left them open."""
    prepared: Prepared
    task: Task
    model: Composed
    share: Share
    order: Order
    loader: Loader
    feed: Feed
    optimizer: Optimizer
    base: Base | None = None
    """What its adapters are beside, if it trains adapters."""

    @property
    def units_per_step(self) -> int:
        """Tokens or samples, of all ranks."""
        return self.share.global_batch * self.task.units_per_sample

    def state(self) -> dict[str, Any]:
        """What a checkpoint holds: the very tensors."""
        return self.model.exchange.saved(self.model.state(), self.optimizer.state())

    def restore(self, read: Callable[[dict[str, Any]], None]) -> None:
        """Reads a checkpoint; `read` is given tensors to read into."""
        self.model.exchange.restore(read, self.model.state(), self.optimizer.state())

    def layout(self, config: RunConfig, world: World) -> dict[str, Any]:
        """How the ranks share the work: for a checkpoint's manifest."""
        return {
            "parallelism": config.parallelism,
            "axes": dict(self.model.shape),
            "micro_batch": self.share.micro_batch,
            "device": world.device.type,
            "threads": torch.get_num_threads(),
        }


def assemble(
    config: RunConfig,
    place: Place,
    world: World,
    start: Manifest | None,
    *,
    heartbeat: Heartbeat | NullHeartbeat,
    reporter: AnyReporter,
) -> Assembly:
    """Weights and order as the run's seed, or weights that it names, give them; a checkpoint is read into it later."""
    recipe = contracts.recipe(config.recipe)
    prepared = supply.prepare(
        recipe,
        config,
        world,
        cache=cache_dir(place.run_dir),
        identity=start.data if start else None,
        heartbeat=heartbeat,
        reporter=reporter,
    )
    telling = supply.Telling(world, heartbeat, reporter)
    config = origin.as_trained(config, start)
    has_adapters = bool(config.recipe_options().get("lora_rank"))
    config, came = origin.settle(recipe, config, place, world, start, telling, has_adapters=has_adapters)
    torch.manual_seed(derive_seed(config.seed))
    task = supply.build(recipe, config, prepared, came.path)
    config = _planned(config, task, world, reporter, lacking=_is_lacking(place, world, start))
    _check_mesh(config, world, task.dims)  # now that the data, and weights it starts from, have told the sizes
    model = Composed(task, config, world)
    share = _share(config, model, start, full=place.full_world_size or world.size)
    order = Order(task.samples["train"], derive_seed(config.seed, 1))
    loader = Loader(order, share)
    done, consumed = (start.step, start.consumed_samples) if start else (0, 0)  # of batches that had another size
    end = consumed + (config.steps - done) * config.global_batch
    return Assembly(
        config=config,
        prepared=prepared,
        task=task,
        model=model,
        share=share,
        order=order,
        loader=loader,
        feed=Feed(task, loader, divide=model.divide, device=world.device, end=end),
        optimizer=model.optimizer(),
        base=came.base,
    )


def _planned(config: RunConfig, task: Task, world: World, reporter: AnyReporter, *, lacking: bool) -> RunConfig:
    """What `parallelism = "auto"` comes to here, as rank 0 finds it."""
    if config.parallelism != shape.AUTO:
        return config
    found: Plan | ConfigError | None = None
    if world.leads:
        per_node = int(os.environ.get("LOCAL_WORLD_SIZE", world.size))
        on_cpu = world.device.type != "cuda"
        ranks = Ranks(world.size, per_node, _memory_bytes(world.device, per_node), lacking, on_cpu)
        try:
            found = plan(config, ranks, task.dims)
            print(*found.lines(ranks), sep="\n", flush=True)
            reporter.event("plan.chosen", mesh=dict(found.shape), parallelism=found.config.parallelism, why=found.why)
        except ConfigError as error:
            found = error
    agreed: Plan | ConfigError = broadcast(world, found)
    if isinstance(agreed, ConfigError):
        raise agreed
    return agreed.config


def _memory_bytes(device: torch.device, per_node: int) -> int:
    """The memory of one rank: its GPU's, or its part of the machine's."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // per_node


def check(config: RunConfig, place: Place, world: World, start: Manifest | None) -> None:
    """A fresh run must divide evenly over its ranks; one that has lost or lacks some goes on with what it has."""
    config = origin.as_trained(config, start)
    if not _is_lacking(place, world, start):
        problems = list(checking.problems(config, world.size))
        if problems:
            raise ConfigError(Problem(f"run.{problem.field}", problem.message) for problem in problems)
    elif config.parallelism != shape.AUTO:  # else it is planned, once the model's sizes are known
        _check_mesh(config, world)
    if start is not None:
        by_hand = "Name another --run-dir, or begin anew with --resume none."
        _check_same_model(config, start, "Clone the job to change it." if place.launched else by_hand)


def _is_lacking(place: Place, world: World, start: Manifest | None) -> bool:
    """Whether these are other ranks than the run was made for: some are lost or lacking, or came back."""
    return place.full_world_size > world.size or (start is not None and start.world_size != world.size)


def _check_mesh(config: RunConfig, world: World, dims: Dims | None = None) -> None:
    """Checks all that must fit on other ranks than the run was made for: the mesh, and a sample at least for each."""
    problems = (*shape.check(config, world.size, dims, lacking=True), *communication.check(config, world.size))
    if problems:
        raise ConfigError(Problem(f"run.{problem.field}", str(problem)) for problem in problems)


def _check_same_model(config: RunConfig, start: Manifest, remedy: str) -> None:
    """Steps, batch and learning rate may change when a run is resumed; what the tensors are may not."""
    now, before = config.numerics(), start.config
    changed = [("recipe", before.get("recipe"), now["recipe"])]
    if before.get("recipe") == now["recipe"]:
        new = now.get(config.recipe, {})
        # An option that is younger than the checkpoint had its default.
        old = {**choices.get("recipes", config.recipe).with_defaults({}), **before.get(config.recipe, {})}
        old = {name: value for name, value in old.items() if name in new or name in before.get(config.recipe, {})}
        changed = [(f"{config.recipe}.{name}", old.get(name), new.get(name)) for name in sorted({*old, *new})]
    wrong = [
        Problem(f"run.{name}", f"is {is_!r}, but {start.name} was trained with {was!r}. {remedy}")
        for name, was, is_ in changed
        if was != is_
    ]
    if wrong:
        raise ConfigError(wrong)


def _share(config: RunConfig, model: Composed, start: Manifest | None, *, full: int) -> Share:
    """The micro-batch stays what it was, or would be with all ranks, when some are lost or lacking: memory doesn't
    grow, accumulation does."""
    index, count = meshes.coordinate(model.mesh)
    before = start.layout.get("micro_batch") if start and not model.is_piped else None
    lacking = full > model.shape.world_size and not model.is_piped
    alone = -(-config.global_batch * model.shape.world_size // (count * full)) if lacking else model.micro_batch
    micro = config.micro_batch or (before if isinstance(before, int) else alone)
    return Share(index, count, config.global_batch, micro)
