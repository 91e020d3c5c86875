"""Assemble what a run trains with, from its configuration: data, model over the ranks, optimizer."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from training import contracts
from training.attempt.heartbeat import Heartbeat, NullHeartbeat
from training.attempt.workspace import Workspace
from training.config import choices, communication, mesh, shape
from training.config.base import ConfigError, Problem
from training.config.dims import Dims
from training.config.run_config import RunConfig
from training.corpus.cache import cache_dir
from training.data import Prepared, Task
from training.engine.composing import ComposedModel
from training.loader import supply
from training.loader.feeding import Feed
from training.loader.order import Loader, Order, Share
from training.manifest import Manifest
from training.planning import checking
from training.planning.layouts import LayoutPlan, Ranks
from training.planning.plan import plan
from training.reporting.reporter import AnyReporter
from training.runtime.distributed import World, broadcast
from training.runtime.seeds import derive_seed
from training.step import meshes
from training.step.optimizer import Optimizer
from training.weights import origin
from training.weights.base import BaseWeights


@dataclass(frozen=True, kw_only=True)
class Assembly:
    """Everything that one rank trains with."""

    config: RunConfig
    """The configuration, including the axes that were chosen for it."""
    prepared: Prepared
    task: Task
    model: ComposedModel
    share: Share
    order: Order
    loader: Loader
    feed: Feed
    optimizer: Optimizer
    base: BaseWeights | None = None
    """The frozen weights that its adapters are for, if it trains adapters."""

    @property
    def units_per_step(self) -> int:
        """Tokens or samples per step, over all ranks."""
        return self.share.global_batch * self.task.units_per_sample

    def state(self) -> dict[str, Any]:
        """Return the tensors that a checkpoint saves, not copies of them."""
        return self.model.exchange.saved(self.model.state(), self.optimizer.state())

    def restore(self, read: Callable[[dict[str, Any]], None]) -> None:
        """Read a checkpoint; `read` is called with the tensors to read into."""
        self.model.exchange.restore(read, self.model.state(), self.optimizer.state())

    def layout(self, config: RunConfig, world: World) -> dict[str, Any]:
        """Return how the ranks share the work, for a checkpoint's manifest."""
        return {
            "parallelism": config.parallelism,
            "axes": dict(self.model.shape),
            "micro_batch": self.share.micro_batch,
            "device": world.device.type,
            "threads": torch.get_num_threads(),
        }


def assemble(
    config: RunConfig,
    workspace: Workspace,
    world: World,
    start: Manifest | None,
    *,
    heartbeat: Heartbeat | NullHeartbeat,
    reporter: AnyReporter,
) -> Assembly:
    """Assemble a run: weights and order from its seed, or the weights that it names.

    A checkpoint is read into it later.
    """
    recipe = contracts.recipe(config.recipe)
    prepared = supply.prepare(
        recipe,
        config,
        world,
        cache=cache_dir(workspace.run_dir),
        identity=start.data if start else None,
        heartbeat=heartbeat,
        reporter=reporter,
    )
    reporting = supply.LeaderWork(world, heartbeat, reporter)
    config = origin.as_trained(config, start)
    has_adapters = bool(config.recipe_options().get("lora_rank"))
    config, initial = origin.resolve_weights(
        recipe, config, workspace, world, start, reporting, has_adapters=has_adapters
    )
    torch.manual_seed(derive_seed(config.seed))
    task = supply.build(recipe, config, prepared, initial.path)
    config = _planned(config, task, world, reporter, allow_uneven=_has_other_ranks(workspace, world, start))
    _check_mesh(config, world, task.dims)  # now that the data and the initial weights have determined the sizes
    model = ComposedModel(task, config, world)
    share = _share(config, model, start, full=workspace.full_world_size or world.size)
    order = Order(task.samples["train"], derive_seed(config.seed, 1))
    loader = Loader(order, share)
    done, consumed = (start.step, start.consumed_samples) if start else (0, 0)  # with batches of another size
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
        base=initial.base,
    )


def _planned(config: RunConfig, task: Task, world: World, reporter: AnyReporter, *, allow_uneven: bool) -> RunConfig:
    """Return the configuration with the layout that `parallelism = "auto"` results in here, planned by rank 0."""
    if config.parallelism != shape.AUTO:
        return config
    result: LayoutPlan | ConfigError | None = None
    if world.leads:
        per_node = int(os.environ.get("LOCAL_WORLD_SIZE", world.size))
        on_cpu = world.device.type != "cuda"
        ranks = Ranks(world.size, per_node, _memory_bytes(world.device, per_node), allow_uneven, on_cpu)
        try:
            result = plan(config, ranks, task.dims)
            print(*result.lines(ranks), sep="\n", flush=True)
            reporter.event(
                "plan.chosen", mesh=dict(result.shape), parallelism=result.config.parallelism, why=result.why
            )
        except ConfigError as error:
            result = error
    agreed: LayoutPlan | ConfigError = broadcast(world, result)
    if isinstance(agreed, ConfigError):
        raise agreed
    return agreed.config


def _memory_bytes(device: torch.device, per_node: int) -> int:
    """Return the memory of one rank: its GPU's, or its share of the machine's."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // per_node


def check(config: RunConfig, workspace: Workspace, world: World, start: Manifest | None) -> None:
    """Check the layout: a new run must divide evenly over its ranks, one with missing ranks continues with what it has.

    Raises ConfigError.
    """
    config = origin.as_trained(config, start)
    if not _has_other_ranks(workspace, world, start):
        problems = list(checking.problems(config, world.size))
        if problems:
            raise ConfigError(Problem(f"run.{problem.field}", problem.message) for problem in problems)
    elif config.parallelism != shape.AUTO:  # otherwise it is planned, once the model's sizes are known
        _check_mesh(config, world)
    if start is not None:
        standalone_remedy = "Choose another --run-dir, or start over with --resume none."
        _check_same_model(config, start, "Clone the job to change it." if workspace.launched else standalone_remedy)


def _has_other_ranks(workspace: Workspace, world: World, start: Manifest | None) -> bool:
    """Return whether the number of ranks differs from the run's: some are missing, or have returned."""
    return workspace.full_world_size > world.size or (start is not None and start.world_size != world.size)


def _check_mesh(config: RunConfig, world: World, dims: Dims | None = None) -> None:
    """Check everything that must fit on a different number of ranks: the mesh, and at least one sample for each."""
    problems = (*mesh.check(config, world.size, dims, allow_uneven=True), *communication.check(config, world.size))
    if problems:
        raise ConfigError(Problem(f"run.{problem.field}", str(problem)) for problem in problems)


def _check_same_model(config: RunConfig, start: Manifest, remedy: str) -> None:
    """Check that the model is unchanged. Raises ConfigError.

    A resumed run may change steps, batch and learning rate, but not the tensors.
    """
    now, before = config.numerics(), start.config
    changed = [("recipe", before.get("recipe"), now["recipe"])]
    if before.get("recipe") == now["recipe"]:
        new = now.get(config.recipe, {})
        # An option that did not exist when the checkpoint was saved had its default.
        old = {**choices.get("recipes", config.recipe).with_defaults({}), **before.get(config.recipe, {})}
        old = {name: value for name, value in old.items() if name in new or name in before.get(config.recipe, {})}
        changed = [(f"{config.recipe}.{name}", old.get(name), new.get(name)) for name in sorted({*old, *new})]
    problems = [
        Problem(f"run.{name}", f"is {is_!r}, but {start.name} was trained with {was!r}. {remedy}")
        for name, was, is_ in changed
        if was != is_
    ]
    if problems:
        raise ConfigError(problems)


def _share(config: RunConfig, model: ComposedModel, start: Manifest | None, *, full: int) -> Share:
    """Return this rank's share.

    With missing ranks the micro-batch stays as it was: accumulation grows, memory does not.
    """
    index, count = meshes.coordinate(model.mesh)
    before = start.layout.get("micro_batch") if start and not model.has_pipeline else None
    is_reduced = full > model.shape.world_size and not model.has_pipeline
    micro_batch = (
        -(-config.global_batch * model.shape.world_size // (count * full)) if is_reduced else model.micro_batch
    )
    micro = config.micro_batch or (before if isinstance(before, int) else micro_batch)
    return Share(index, count, config.global_batch, micro)
