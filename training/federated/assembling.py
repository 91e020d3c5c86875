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

DTYPES = {"fp32": torch.float32, "fp64": torch.float64, "bf16": torch.float32}


@dataclass(frozen=True, kw_only=True)
class Federation:
    """What one rank works with."""

    config: FederationConfig
    prepared: Prepared
    divided: Divided
    model: Model
    work: Work
    server: Server


def assemble(
    config: FederationConfig,
    place: Place,
    world: World,
    start: Manifest | None,
    *,
    heartbeat: Heartbeat | NullHeartbeat,
    reporter: AnyReporter,
) -> Federation:
    """Weights as the run's seed gives them; a checkpoint is read into it later."""
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
    dtype = DTYPES[config.dtype]
    torch.manual_seed(derive_seed(config.seed))
    with _default(dtype):
        task = supply.build(recipe, config, prepared)
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
    return Federation(config=config, prepared=prepared, divided=divided, model=model, work=work, server=server)


def _as_vectors(
    config: FederationConfig, task: Task, device: torch.device, dtype: torch.dtype
) -> tuple[Model, Tensor, Tensor]:
    """The model with its layout, its weights (numbers,) and its running statistics (numbers,)."""
    algorithm = contracts.algorithm(config.algorithm)
    options = config.options_of(config.algorithm)
    algorithm.equip(task, config.clients, **options)
    module: nn.Module = task.model.to(device, dtype)
    module.train()
    own = frozenset(algorithm.personal(module, **options))
    trained, running = parameters(module), statistics(module)
    weights, others = Layout.of(trained, own.__contains__), Layout.of(running, own.__contains__)
    model = Model(task, weights, others, algorithm, options, device, dtype)
    return model, weights.vector(trained).to(device, dtype), others.vector(running).to(device, dtype)


@contextmanager
def _default(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
