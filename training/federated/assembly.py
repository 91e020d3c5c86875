"""What a federation trains with: its data and whose they are, its model as vectors, how its clients are computed."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from training.attempt.heartbeat import Heartbeat, NullHeartbeat
from training.attempt.place import Place
from training.config.asked import ConfigError, Problem
from training.corpus.cache import cache_dir
from training.data import Batch, Ids, Prepared, Split, Task
from training.engine import filling
from training.federated import attack_simulation
from training.federated.client_work import Work
from training.federated.custom import part_loader
from training.federated.custom.program import Program
from training.federated.filter_chain import Chain
from training.federated.layout import Layout, parameters, statistics
from training.federated.model import Model, normalises
from training.federated.pending_updates import Pending
from training.federated.server import Server
from training.federated.stacking import why_alone
from training.federation import data_division, parts
from training.federation.config import FederationConfig
from training.federation.data_division import Divided
from training.federation.parts import Aggregation, Algorithm, DataSplit, Selection
from training.loader import supply
from training.manifest import Manifest
from training.reporting.reporter import AnyReporter
from training.runtime.distributed import World
from training.runtime.seeds import derive_seed
from training.weights import origin
from training.weights.base import Base

LASTING = ("recipe", "clients", "seed", "dtype", "algorithm", "split", "class_imbalance", "adapters", "filters")
"""What a resumed run can't change, with the options of what is chosen; rounds, rates, pace and selection may."""
BY_HAND = "Name another --run-dir, or begin anew with --resume none."
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
    aggregation: Aggregation
    selection: Selection
    base: Base | None = None
    """What its adapters are beside, if it trains adapters."""


def assemble(
    config: FederationConfig,
    place: Place,
    world: World,
    start: Manifest | None,
    program: Program | None = None,
    *,
    heartbeat: Heartbeat | NullHeartbeat,
    reporter: AnyReporter,
) -> Federation:
    """Weights as the run's seed, or weights that it names, give them; a checkpoint is read into it later."""
    config = origin.as_trained(config, start)
    if start is not None:
        config = _divided_as(config, start)
        _check_same(config, start, "Clone the job to change it." if place.launched else BY_HAND)
    recipe, algorithm = part_loader.recipe(config, program), part_loader.algorithm(config, program)
    aggregation, selection = part_loader.aggregation(config, program), part_loader.selection(config, program, world)
    split = part_loader.split(config, program, world)
    prepared = supply.prepare(
        recipe,
        config,
        world,
        cache=cache_dir(place.run_dir),
        identity=start.data if start else None,
        heartbeat=heartbeat,
        reporter=reporter,
    )
    adapters = parts.adapters(config.adapters)
    telling = supply.Telling(world, heartbeat, reporter)
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
    divided = data_division.divide(config, labels, split)
    if misfits := list(data_division.check(config, divided)):
        raise ConfigError(Problem(f"run.{misfit.field}", str(misfit)) for misfit in misfits)
    task = attack_simulation.relabelled(config, _as_seen(config, task, divided, split), divided)
    model, weights, running = _as_vectors(config, algorithm, task, world.device, dtype)
    filters = Chain(config, model.weights.shared, dtype)
    work = Work(config, model, divided, filters, alone=why_alone(config, model))
    server = Server(model, divided.sizes, weights, running, world)
    server.kept.initialize({name: values[0] for name, values in filters.begin(1, world.device).items()})
    work.try_out(server)
    server.pending = Pending(divided.sizes, sum(work.sizes_of(work.training, server).values()), weights)
    return Federation(
        config=config,
        prepared=prepared,
        divided=divided,
        model=model,
        work=work,
        server=server,
        aggregation=aggregation,
        selection=selection,
        base=came.base,
    )


def _as_seen(config: FederationConfig, task: Task, divided: Divided, split: DataSplit) -> Task:
    """The task with samples as their clients see them, whoever looks them up: to train or to judge."""
    view, options = split.view, config.options_of(config.split)
    if view is None:
        return task

    def batch(split: Split, ids: Ids) -> Batch:
        return view(task.batch(split, ids), divided.owners[split][ids], config.seed, **options)

    return replace(task, batch=batch)


def _as_vectors(
    config: FederationConfig, algorithm: Algorithm, task: Task, device: torch.device, dtype: torch.dtype
) -> tuple[Model, Tensor, Tensor]:
    """The model with its layout, its weights (numbers,) and its running statistics (numbers,)."""
    options = config.options_of(config.algorithm)
    algorithm.equip(task, config.clients, **options)
    module: nn.Module = task.model.to(device, dtype)
    module.train()
    own = _personal(config, algorithm, task)
    trained, running = parameters(module), _running(task, module, device, dtype)
    if not trained:
        raise ConfigError([Problem("run.recipe", f"{config.recipe} makes a model that has nothing to train.")])
    weights, others = Layout.of(trained, own.__contains__), Layout.of(running, own.__contains__)
    constants = parts.adapters(config.adapters).constants(module)
    held = {name: module.get_parameter(name).detach() for name in constants}
    model = Model(task, weights, others, algorithm, options, device, dtype, held)
    return model, weights.vector(trained).to(device, dtype), others.vector(running).to(device, dtype)


def _running(task: Task, module: nn.Module, device: torch.device, dtype: torch.dtype) -> dict[str, Tensor]:
    """What changes as the model trains: of buffers that are no layer's of ours, those that a step changes. Masks and
    tables of positions are constants, and stay where they are."""
    found = statistics(module)
    ours = set(normalises(module))
    if found.keys() <= ours:
        return found
    probe = copy.deepcopy(module)
    ids = np.arange(min(2, task.samples["train"]))
    parts = task.batch("train", ids)
    batch = tuple(part.to(device, dtype if part.is_floating_point() else None) for part in parts)
    with torch.random.fork_rng(devices=[]), torch.no_grad(), suppress(Exception):  # what fails is told of in its place
        task.loss(probe, batch)
    after = statistics(probe)
    return {name: value for name, value in found.items() if name in ours or _differ(value, after[name])}


def _differ(one: Tensor, other: Tensor) -> bool:
    return one.shape != other.shape or not torch.equal(one.nan_to_num(), other.nan_to_num())


def _divided_as(config: FederationConfig, start: Manifest) -> FederationConfig:
    """Return the configuration with the checkpoint's split, where an option of it was left at a default that is younger
    than the checkpoint: the same clients have the same samples."""
    former, split = parts.split(config.split).FORMER, config.split
    before, now = start.config.get(split) or {}, config.options_of(split)
    defaults = config.taken()[split].with_defaults({})
    same = {name: before.get(name, value) for name, value in former if now.get(name) == defaults[name]}
    if start.config.get("split") != split or not same:
        return config
    return config.model_copy(update={"options": {**config.options, split: {**now, **same}}})


def _check_same(config: FederationConfig, start: Manifest, remedy: str) -> None:
    """ConfigError, by field, where the checkpoint is of another federation."""
    now, before = config.numerics(), start.config
    wrong = [
        Problem(f"run.{name}", f"is {is_!r}, but {start.name} was trained with {was!r}. {remedy}")
        for name, was, is_ in _lasting(config, now, before)
        if was != is_
    ]
    if wrong:
        raise ConfigError(wrong)


def _lasting(
    config: FederationConfig, now: Mapping[str, Any], before: Mapping[str, Any]
) -> Iterator[tuple[str, object, object]]:
    """(field, what it was, what it is): what is chosen, and each choice's options."""
    usual = {field: FederationConfig.model_fields[field].get_default(call_default_factory=True) for field in LASTING}
    yield from ((field, before.get(field, usual[field]), now[field]) for field in LASTING)
    chosen = config.taken()
    for field in LASTING:
        for name in now[field] if isinstance(now[field], list) else [now[field]]:
            if isinstance(name, str) and name in chosen and isinstance(before.get(name), dict):
                # An option that is younger than the checkpoint had its default, or what it stood for.
                former = dict(parts.split(name).FORMER) if field == "split" else {}
                was = {**chosen[name].with_defaults({}), **former, **before[name]}
                is_ = {**chosen[name].with_defaults({}), **now.get(name, {})}
                yield from ((f"{name}.{option}", was[option], is_.get(option)) for option in was)


def _personal(config: FederationConfig, algorithm: Algorithm, task: Task) -> frozenset[str]:
    """The tensors that stay with each client; ConfigError if the model lacks what the algorithm is about."""
    lacks = "no head that is told apart" if algorithm.HEAD and not task.head else ""
    own = () if lacks else algorithm.personal(task.model, head=task.head, **config.options_of(config.algorithm))
    if not own and algorithm.OWNS:
        lacks = lacks or "no part that could be each client's own"
    if lacks:
        text = f'is "{config.algorithm}", but the model of {config.recipe} has {lacks}. Write "fedavg".'
        raise ConfigError([Problem("run.algorithm", text)])
    return frozenset(own)


@contextmanager
def _default(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
