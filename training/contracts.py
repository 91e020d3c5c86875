"""Define the interfaces of recipes, parallelisms and communications; those of a federation are in federation.parts.

A module of recipes/, parallel/ or comm/ implements one by defining functions and constants of the field's names; the
field's default stands in for what it leaves out. Nothing is registered or inherited. What the portal calls (`check`,
`dims`, `knows_sizes`) must work without torch, and so must importing the module: import torch inside the functions that
use it. `**options` are the module's own options, the keyword-only arguments of its entry function or the fields of its
dataclass (see training.config.choices); each function declares those that it uses and takes the rest as `**options`.

Further constants are read without importing anything, by config.choices: a parallelism's `AXES` (those of the mesh
that it works along, outermost first); a recipe's `BOOKKEEPING` (options that decide no number, so a resume may change
them), `FIRST` (options that a form shows before the others, in this order) and `ADAPTERS` (those that its model has a
place for in a federation); and what a communication `SENDS` (bytes of a rank in a step, for people).
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import MISSING, dataclass, fields, is_dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from training.config import choices
from training.config.choices import ChoiceError, Value

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.distributed.device_mesh import DeviceMesh

    from training.comm._exchange import Exchange
    from training.config.base import BaseRunConfig
    from training.config.dims import Dims
    from training.config.shape import Misfit, Shape
    from training.data import Batch, Labels, Prepared, Task
    from training.step.optimizer import Optimizer

T = TypeVar("T")


def recipe(name: str) -> Recipe:
    """Return the recipe of that name. Raises ChoiceError."""
    return load_contract("recipes", name, Recipe)


def parallelism(name: str) -> Parallelism:
    """Return the parallelism of that name. Raises ChoiceError."""
    return load_contract("parallel", name, Parallelism)


def communication(name: str) -> Communication:
    """Return the communication of that name. Raises ChoiceError."""
    return load_contract("comm", name, Communication)


def load_contract(folder: str, name: str, contract: type[T]) -> T:
    """Return the module of that name, read once. Raises ChoiceError if it is missing or lacks a required field."""
    return choices.cached(("contract", folder, name), lambda: _read(folder, name, contract))


def _read(folder: str, name: str, contract: type[T]) -> T:
    """Read what the module defines. Raises ChoiceError if it lacks something required."""
    module = importlib.import_module(f"training.{folder}.{name}")
    contract_fields = fields(contract)  # type: ignore[arg-type]
    defined = {field.name: getattr(module, field.name) for field in contract_fields if hasattr(module, field.name)}
    for field in contract_fields:
        if field.default is MISSING and field.name not in defined:
            raise ChoiceError(f"{module.__file__}: no `{field.name}`, which every {contract.__name__.lower()} has")
    return contract(**defined)


# Defaults for what modules leave out.


def _accept_anything(shape: Shape, **options: object) -> None:
    """Accept everything."""


def _no_misfit(config: BaseRunConfig, shape: Shape) -> Iterable[Misfit]:
    return ()


def _no_dims(**options: object) -> Dims | None:
    return None


def _no_labels(data: Path, **options: object) -> Labels | None:
    return None


def _true(**options: object) -> bool:
    return True


def _no_weights(*arguments: object, **options: object) -> Any:
    raise ChoiceError("a recipe with an option from_weights needs functions `resolve_options` and `weights`, too")


def _no_context(model: nn.Module) -> AbstractContextManager[None]:
    return nullcontext()


def _no_step_context(**options: object) -> AbstractContextManager[object]:
    return nullcontext()


def _whole_batch(batch: Batch, mesh: DeviceMesh) -> Batch:
    return batch


def _false(**options: object) -> bool:
    return False


def _single_micro_batch(share: int, shape: Shape, **options: object) -> int:
    return 1


def _no_extra_bytes(**options: object) -> int:
    return 0


@dataclass(frozen=True)
class Recipe:
    """A model and the data that it is trained on."""

    prepare: Callable[..., Prepared]
    """(cache, identity, [report_progress], **options): return the data on disk; create them if they do not exist.

    `identity` names the data that a checkpoint was trained on; None: use what the options say. `report_progress`, if
    declared, has to be called every few seconds with a sentence about the progress, or the run counts as hung. Raises
    DataError, which names the option.
    """
    build: Callable[..., Task]
    """(data, **options) or (data, options): return the model and its samples, on every rank, from what
    `prepare` returned."""
    dims: Callable[..., Dims | None] = _no_dims
    """(**options): return the model's sizes, by which axes split it and memory is estimated. None: they are unknown,
    and only the batch is divided over ranks. Raises ValueError if the sizes do not fit together."""
    knows_sizes: Callable[..., bool] = _true
    """(**options): return whether the options determine `dims`; if not, the weights that it starts from do."""
    check: Callable[[BaseRunConfig, Shape], Iterable[Misfit]] = _no_misfit
    """(options, shape): yield the options that do not work together or on this shape, without opening a file."""
    resolve_options: Callable[..., dict[str, Value]] = _no_weights
    """(path, **options): return the options that the weights at `path` imply. Raises DataError if they contradict."""
    weights: Callable[[Path, Path], Callable[[str], Tensor | None]] = _no_weights
    """(weights, data): return a function from a parameter's name to its whole, memory-mapped tensor, or to None for a
    parameter that is initialised from the seed."""
    labels: Callable[..., Labels | None] = _no_labels
    """(data, **options): return the labels by which a federation divides the samples, without torch. None: it can't."""
    has_owners: Callable[..., bool] = _false
    """(**options): return whether `labels` names the owner of each sample."""
    TAKES_CLIENT_CODE: bool = False
    """Whether `prepare`, `labels` and `build` take a user's client.py as their first argument (`bind_client_code`)."""
    SHIPPED: bool = False
    """Whether the data are part of it: `prepare` creates nothing, and everybody may see them."""

    def bind_client_code(self, client_code: object) -> Recipe:
        """Return the recipe with a user's client.py as the first argument of `prepare`, `labels` and `build`."""
        given = {name: partial(getattr(self, name), client_code) for name in ("prepare", "labels", "build")}
        return replace(self, **given)  # type: ignore[arg-type]

    def call_prepare(
        self, cache: Path, identity: str | None, options: Mapping[str, Value], *, report_progress: Callable[..., None]
    ) -> Prepared:
        """Call `prepare` with those options of a run that it declares.

        `report_progress` is passed on if `prepare` declares it. Raises DataError.
        """
        given: dict[str, Any] = _declared(self.prepare, options)
        if "report_progress" in inspect.signature(self.prepare).parameters:
            given["report_progress"] = report_progress
        return self.prepare(cache, identity, **given)

    def call_labels(self, data: Path, options: Mapping[str, Value]) -> Labels | None:
        """Call `labels` with those options of a run that it declares."""
        return self.labels(data, **_declared(self.labels, options))

    def call_build(self, data: Path, options: Mapping[str, Value]) -> Task:
        """Call `build` with those options of a run that it declares."""
        return self.build(data, **_declared(self.build, options))


@dataclass(frozen=True)
class Parallelism:
    """A way to divide the model, its state or the batch over the ranks of its mesh axes."""

    apply: Callable[..., nn.Module]
    """(model, mesh, **options): return the model, or this rank's stage of it, as training calls it. An option called
    `dtype` defaults to the run's."""
    check: Callable[..., None] = _accept_anything
    """(shape, **options): raise shape.Misfit with the nearest value that works, without torch."""
    no_sync: Callable[[nn.Module], AbstractContextManager[None]] = _no_context
    """(model): a context for all micro-batches of a step but the last, in which gradients accumulate locally."""
    step_context: Callable[..., AbstractContextManager[object]] = _no_step_context
    """(**options): a context for forward pass, loss and backward pass."""
    divide: Callable[[Batch, DeviceMesh], Batch] = _whole_batch
    """(batch, mesh): return the part of the batch that this rank computes."""
    splits_tokens: Callable[..., bool] = _false
    """(**options): return whether its ranks compute different tokens of a sample: they then draw different random
    numbers, else the same."""
    micro_batches: Callable[..., int] = _single_micro_batch
    """(share, shape, **options): return the default number of micro-batches for a rank's share of the batch."""
    forward_backward: Callable[..., Tensor] | None = None
    """(task, model, micro_batches, no_sync): replaces step.arithmetic's function of this name; see there."""
    score: Callable[..., dict[str, Tensor]] | None = None
    """(task, model, batch): replaces the task's `score` where one rank cannot evaluate the model alone."""
    optimizer: Callable[..., Optimizer] | None = None
    """(named parameters, mesh, weight_decay=…): replaces AdamW on this rank's parameters."""
    WITHOUT_WEIGHTS: bool = False
    """Whether it can be applied before memory for the weights is allocated, so that no rank ever stores them all."""


class TrainingLoop(Protocol):
    """One rank's run from its start to its end or a stop, such as training.trainer.Trainer."""

    def run(self) -> bool:
        """Run it; return whether it reached its end."""


@dataclass(frozen=True)
class Communication:
    """A way to keep replicas of the model in agreement, after each step or after several."""

    exchange: Callable[..., Exchange]
    """(peers, **options): return the exchange between them."""
    check: Callable[..., None] = _accept_anything
    """(shape, **options): raise shape.Misfit for what does not work, without torch."""
    trainer: Callable[[], Callable[..., TrainingLoop]] | None = None
    """Returns a class that replaces training.trainer.Trainer and takes the same arguments."""
    extra_bytes_per_parameter: Callable[..., int] = _no_extra_bytes
    """(**options): return the additional bytes of memory per trained parameter."""
    ACCUMULATES_GRADIENTS: bool = False
    """Whether it accumulates gradients over several steps."""


def _declared(function: Callable[..., object], options: Mapping[str, Value]) -> dict[str, Any]:
    """Return those of a recipe's options that this function declares (each has a default: training.config.choices).

    If it takes them all at once, as a dataclass, they are that one argument.
    """
    function = getattr(function, "func", function)  # without what `Recipe.bind_client_code` has bound
    annotation = getattr(function, "__annotations__", {}).get(choices.OPTIONS)
    kind = function.__globals__.get(annotation) if isinstance(annotation, str) else annotation
    if isinstance(kind, type) and is_dataclass(kind):
        names = {field.name for field in fields(kind)}
        return {choices.OPTIONS: kind(**{name: value for name, value in options.items() if name in names})}
    declared: Sequence[str] = list(getattr(function, "__kwdefaults__", None) or ())
    return {name: value for name, value in options.items() if name in declared}
