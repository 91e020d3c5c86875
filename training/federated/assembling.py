"""What a federation trains with: its data and whose they are, its model as vectors, how its clients are computed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from training import contracts
from training.attempt.heartbeat import Heartbeat, NullHeartbeat
from training.attempt.place import Place
from training.config.asked import ConfigError, Problem
from training.corpus.cache import cache_dir
from training.data import Prepared, Task
from training.engine import filling
from training.federated.layout import Layout, parameters, statistics
from training.federated.pending import Pending
from training.federated.server import Server
from training.federated.working import Model, Work, why_alone
from training.federation import splitting
from training.federation.config import FederationConfig
from training.federation.splitting import Divided
from training.loader import supply
from training.manifest import Manifest
from training.reporting.reporter import AnyReporter
from training.runtime.distributed import World
from training.runtime.seeds import derive_seed
from training.weights import origin
from training.weights.base import Base

DTYPES = {"fp32": torch.float32, "fp64": torch.float64, "bf16": torch.float32}


@dataclass(frozen=True, kw_only=True)
class Federation:
    """What one rank works with."""

    config: FederationConfig
    """The configuration, with the sizes of the weights that it starts from."""
    prepared: Prepared
    divided: Divided
    model: Model
    work: Work
    server: Server
    base: Base | None = None
    """What its adapters are beside, if it trains adapters."""


def assemble(
    config: FederationConfig,
    place: Place,
    world: World,
    start: Manifest | None,
    *,
    heartbeat: Heartbeat | NullHeartbeat,
    reporter: AnyReporter,
) -> Federation:
    """Weights as the run's seed, or weights that it names, give them; a checkpoint is read into it later."""
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
    adapters = contracts.adapters(config.adapters)
    telling = supply.Telling(world, heartbeat, reporter)
    config = origin.as_trained(config, start)
    config, came = origin.settle(recipe, config, place, world, start, telling, has_adapters=adapters.BESIDE)
    dtype = DTYPES[config.dtype]
    torch.manual_seed(derive_seed(config.seed))
    with _default(dtype):
        task = supply.build(recipe, config, prepared, came.path)
        task = adapters.adapt(task, **config.options_of(config.adapters))
    filling.fill(task, config.seed, world.device)
    labels = recipe.labelled(prepared.path, config.recipe_options())
    if labels is None:
        raise ConfigError([Problem("run.recipe", f"{config.recipe} does not say how its data could be divided.")])
    divided = splitting.divide(config, labels)
    if misfits := list(splitting.check(config, divided)):
        raise ConfigError(Problem(f"run.{misfit.field}", str(misfit)) for misfit in misfits)
    model, weights, running = _as_vectors(config, task, world.device, dtype)
    work = Work(config, model, divided, alone=why_alone(config, model))
    server = Server(model, divided.sizes, weights, running)
    work.try_out(server)
    server.pending = Pending(divided.sizes, sum(work.sizes_of(work.training, server).values()), weights)
    return Federation(
        config=config, prepared=prepared, divided=divided, model=model, work=work, server=server, base=came.base
    )


def _as_vectors(
    config: FederationConfig, task: Task, device: torch.device, dtype: torch.dtype
) -> tuple[Model, Tensor, Tensor]:
    """The model with its layout, its weights (numbers,) and its running statistics (numbers,)."""
    algorithm = contracts.algorithm(config.algorithm)
    options = config.options_of(config.algorithm)
    module: nn.Module = task.model.to(device, dtype)
    module.train()
    own = frozenset(algorithm.personal(module, **options))
    trained, running = parameters(module), statistics(module)
    weights, others = Layout.of(trained, own.__contains__), Layout.of(running, own.__contains__)
    constants = contracts.adapters(config.adapters).constants(module)
    held = {name: module.get_parameter(name).detach() for name in constants}
    model = Model(task, weights, others, algorithm, options, device, dtype, held)
    return model, weights.vector(trained).to(device, dtype), others.vector(running).to(device, dtype)


@contextmanager
def _default(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
