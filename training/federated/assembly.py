"""Assemble a federation on one rank: divided data, the model as vectors, the server, and the clients' computation."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from training.attempt.heartbeat import Heartbeat, NullHeartbeat
from training.attempt.workspace import Workspace
from training.config.base import ConfigError, Problem
from training.contracts import Recipe
from training.corpus.cache import cache_dir
from training.data import Batch, Ids, Prepared, Split, Task
from training.engine import initialization
from training.federated import attack_simulation
from training.federated.client_work import ClientWork
from training.federated.custom import part_loader
from training.federated.custom.user_code import UserCode
from training.federated.filter_chain import FilterChain
from training.federated.layout import Layout, parameters, statistics
from training.federated.model import Model, batch_norm_tensors
from training.federated.pending_updates import PendingUpdates
from training.federated.server import Server
from training.federated.stacking import unstacked_reason
from training.federation import data_division, parts
from training.federation.config import FederationConfig
from training.federation.data_division import DataDivision
from training.federation.parts import Aggregation, Algorithm, DataSplit, Selection
from training.loader import supply
from training.manifest import Manifest
from training.reporting.reporter import AnyReporter
from training.runtime.distributed import World
from training.runtime.seeds import derive_seed
from training.weights import origin
from training.weights.base import BaseWeights

FIXED_FIELDS = ("recipe", "clients", "seed", "dtype", "algorithm", "split", "class_imbalance", "adapters", "filters")
"""Fields that a resumed run must not change, with the options of the chosen modules. Rounds, rates, pace and selection
may change."""
MANUAL_REMEDY = "Name another --run-dir, or start over with --resume none."
DTYPES = {"fp32": torch.float32, "fp64": torch.float64, "bf16": torch.float32}


@dataclass(frozen=True, kw_only=True)
class Federation:
    """A federation on one rank, ready for its first round."""

    config: FederationConfig
    """The configuration, with the sizes of the pretrained weights that it starts from."""
    prepared: Prepared
    divided: DataDivision
    model: Model
    work: ClientWork
    server: Server
    aggregation: Aggregation
    selection: Selection
    base: BaseWeights | None = None
    """The frozen weights that the adapters belong to, if it trains adapters."""


def assemble(
    config: FederationConfig,
    workspace: Workspace,
    world: World,
    start: Manifest | None,
    user_code: UserCode | None = None,
    *,
    heartbeat: Heartbeat | NullHeartbeat,
    reporter: AnyReporter,
) -> Federation:
    """Return the federation with initial or pretrained weights; a checkpoint is read into it later.

    ConfigError if the checkpoint is of another federation, or if parts of the configuration do not fit the data.
    """
    config = origin.as_trained(config, start)
    if start is not None:
        config = _with_split_of_checkpoint(config, start)
        _check_same(config, start, "Clone the job to change it." if workspace.launched else MANUAL_REMEDY)
    chosen = _load_parts(config, user_code, world)
    prepared = supply.prepare(
        chosen.recipe,
        config,
        world,
        cache=cache_dir(workspace.run_dir),
        identity=start.data if start else None,
        heartbeat=heartbeat,
        reporter=reporter,
    )
    progress = supply.LeaderWork(world, heartbeat, reporter)
    has_adapters = parts.adapters(config.adapters).KEEPS_BASE
    config, source = origin.resolve_weights(
        chosen.recipe, config, workspace, world, start, progress, has_adapters=has_adapters
    )
    task = _build_task(config, chosen.recipe, prepared, source.path, world.device)
    divided = _divide(config, chosen, prepared)
    task = _with_client_views(config, task, divided, chosen.split)
    task = attack_simulation.with_attackers_labels(config, task, divided)
    model, work, server = _build_server(config, chosen.algorithm, task, divided, world)
    return Federation(
        config=config,
        prepared=prepared,
        divided=divided,
        model=model,
        work=work,
        server=server,
        aggregation=chosen.aggregation,
        selection=chosen.selection,
        base=source.base,
    )


@dataclass(frozen=True)
class _ChosenParts:
    """The parts that the configuration names, built in or custom."""

    recipe: Recipe
    algorithm: Algorithm
    aggregation: Aggregation
    selection: Selection
    split: DataSplit


def _load_parts(config: FederationConfig, user_code: UserCode | None, world: World) -> _ChosenParts:
    return _ChosenParts(
        part_loader.load_recipe(config, user_code),
        part_loader.load_algorithm(config, user_code),
        part_loader.load_aggregation(config, user_code),
        part_loader.load_selection(config, user_code, world),
        part_loader.load_split(config, user_code, world),
    )


def _build_task(
    config: FederationConfig, recipe: Recipe, prepared: Prepared, weights: Path | None, device: torch.device
) -> Task:
    """Return the task with its model and adapters, whose weights come from the seed or from `weights`."""
    torch.manual_seed(derive_seed(config.seed))
    with _default_dtype(DTYPES[config.dtype]):
        task = supply.build(recipe, config, prepared, weights)
        task = parts.adapters(config.adapters).adapt(task, **config.options_of(config.adapters))
    initialization.fill(task, config.seed, device)
    return task


def _divide(config: FederationConfig, chosen: _ChosenParts, prepared: Prepared) -> DataDivision:
    """Return which client has which sample. ConfigError if the data cannot be divided as configured."""
    labels = chosen.recipe.call_labels(prepared.path, config.recipe_options())
    if labels is None:
        raise ConfigError([Problem("run.recipe", f"{config.recipe} does not say how its data could be divided.")])
    divided = data_division.divide(config, labels, chosen.split)
    if misfits := list(data_division.check(config, divided)):
        raise ConfigError(Problem(f"run.{misfit.field}", str(misfit)) for misfit in misfits)
    return divided


def _build_server(
    config: FederationConfig, algorithm: Algorithm, task: Task, divided: DataDivision, world: World
) -> tuple[Model, ClientWork, Server]:
    """Return the model as vectors, the clients' computation, and the server, which knows the sizes of updates."""
    dtype = DTYPES[config.dtype]
    model, weights, running = _as_flat_vectors(config, algorithm, task, world.device, dtype)
    filters = FilterChain(config, model.weights.shared, dtype)
    work = ClientWork(config, model, divided, filters, unstacked_reason=unstacked_reason(config, model))
    server = Server(model, divided.sizes, weights, running, world)
    server.client_state.initialize({name: values[0] for name, values in filters.begin(1, world.device).items()})
    work.probe(server)
    server.pending = PendingUpdates(divided.sizes, sum(work.sizes_of(work.training_task, server).values()), weights)
    return model, work, server


def _with_client_views(config: FederationConfig, task: Task, divided: DataDivision, split: DataSplit) -> Task:
    """Return the task with the split's view(): samples as their clients see them, in training and evaluation."""
    view, options = split.view, config.options_of(config.split)
    if view is None:
        return task

    def batch(split: Split, ids: Ids) -> Batch:
        return view(task.batch(split, ids), divided.owners[split][ids], config.seed, **options)

    return replace(task, batch=batch)


def _as_flat_vectors(
    config: FederationConfig, algorithm: Algorithm, task: Task, device: torch.device, dtype: torch.dtype
) -> tuple[Model, Tensor, Tensor]:
    """Return the model with its layout, its weights (parameters,) and its running statistics (statistics,)."""
    options = config.options_of(config.algorithm)
    algorithm.extend_model(task, config.clients, **options)
    module: nn.Module = task.model.to(device, dtype)
    module.train()
    personal = _personal_tensors(config, algorithm, task)
    trained, running = parameters(module), _changing_buffers(task, module, device, dtype)
    if not trained:
        raise ConfigError([Problem("run.recipe", f"{config.recipe} makes a model that has nothing to train.")])
    weights, others = Layout.of(trained, personal.__contains__), Layout.of(running, personal.__contains__)
    constants = parts.adapters(config.adapters).constants(module)
    constants_by_name = {name: module.get_parameter(name).detach() for name in constants}
    model = Model(task, weights, others, algorithm, options, device, dtype, constants_by_name)
    return model, weights.vector(trained).to(device, dtype), others.vector(running).to(device, dtype)


def _changing_buffers(task: Task, module: nn.Module, device: torch.device, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return the buffers that training changes: those of batch normalisation, and others that one step changes.

    Masks and tables of positions are constants, and do not travel.
    """
    found = statistics(module)
    ours = set(batch_norm_tensors(module))
    if found.keys() <= ours:
        return found
    probe = copy.deepcopy(module)
    ids = np.arange(min(2, task.samples["train"]))
    parts = task.batch("train", ids)
    batch = tuple(part.to(device, dtype if part.is_floating_point() else None) for part in parts)
    with (
        torch.random.fork_rng(devices=[]),
        torch.no_grad(),
        suppress(Exception),
    ):  # a failure is reported when clients run
        task.loss(probe, batch)
    after = statistics(probe)
    return {name: value for name, value in found.items() if name in ours or _differ(value, after[name])}


def _differ(first: Tensor, second: Tensor) -> bool:
    return first.shape != second.shape or not torch.equal(first.nan_to_num(), second.nan_to_num())


def _with_split_of_checkpoint(config: FederationConfig, start: Manifest) -> FederationConfig:
    """Return the configuration with the checkpoint's split options where the run leaves them at their default.

    A default may be newer than the checkpoint, and clients have to keep their samples.
    """
    former, split = parts.split(config.split).FORMER, config.split
    before, now = start.config.get(split) or {}, config.options_of(split)
    defaults = config.chosen()[split].with_defaults({})
    same = {name: before.get(name, value) for name, value in former if now.get(name) == defaults[name]}
    if start.config.get("split") != split or not same:
        return config
    return config.model_copy(update={"options": {**config.options, split: {**now, **same}}})


def _check_same(config: FederationConfig, start: Manifest, remedy: str) -> None:
    """Raise ConfigError for each field in which the checkpoint is of another federation."""
    now, before = config.numerics(), start.config
    wrong = [
        Problem(f"run.{name}", f"is {is_!r}, but {start.name} was trained with {was!r}. {remedy}")
        for name, was, is_ in _fixed_values(config, now, before)
        if was != is_
    ]
    if wrong:
        raise ConfigError(wrong)


def _fixed_values(
    config: FederationConfig, now: Mapping[str, Any], before: Mapping[str, Any]
) -> Iterator[tuple[str, object, object]]:
    """Yield (field, value in the checkpoint, value now) for the fixed fields and the options of their choices."""
    usual = {
        field: FederationConfig.model_fields[field].get_default(call_default_factory=True) for field in FIXED_FIELDS
    }
    yield from ((field, before.get(field, usual[field]), now[field]) for field in FIXED_FIELDS)
    chosen = config.chosen()
    for field in FIXED_FIELDS:
        for name in now[field] if isinstance(now[field], list) else [now[field]]:
            if isinstance(name, str) and name in chosen and isinstance(before.get(name), dict):
                # An option that is newer than the checkpoint had its default there, or its former meaning.
                former = dict(parts.split(name).FORMER) if field == "split" else {}
                was = {**chosen[name].with_defaults({}), **former, **before[name]}
                is_ = {**chosen[name].with_defaults({}), **now.get(name, {})}
                yield from ((f"{name}.{option}", was[option], is_.get(option)) for option in was)


def _personal_tensors(config: FederationConfig, algorithm: Algorithm, task: Task) -> frozenset[str]:
    """Return the names of the tensors that stay with each client.

    ConfigError if the model lacks what the algorithm needs.
    """
    missing = "no head" if algorithm.NEEDS_HEAD and not task.head else ""
    personal = () if missing else algorithm.personal(task.model, head=task.head, **config.options_of(config.algorithm))
    if not personal and algorithm.NEEDS_PERSONAL_TENSORS:
        missing = missing or "no part that could stay with each client"
    if missing:
        text = f'is "{config.algorithm}", but the model of {config.recipe} has {missing}. Write "fedavg".'
        raise ConfigError([Problem("run.algorithm", text)])
    return frozenset(personal)


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
