"""What a module of recipes/, parallel/ or comm/ may define, and what holds where it leaves something out.

What those of a federation may, federation.parts says.

A module is taken by the names of its functions and constants; nothing is registered or inherited. What the portal asks
for (`check`, `dims`, `knows_sizes`) needs no torch, so neither does importing the module: torch is imported inside the
functions that use it. `**options` are the module's own, the keyword-only arguments of its entry function (see
training.config.choices); each function declares those that it looks at and takes the rest as `**options`.

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
from dataclasses import MISSING, dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from training.config import choices
from training.config.choices import ChoiceError, Value

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.distributed.device_mesh import DeviceMesh

    from training.comm._exchange import Exchange
    from training.config.asked import Asked
    from training.config.dims import Dims
    from training.config.shape import Misfit, Shape
    from training.data import Batch, Labels, Prepared, Task
    from training.step.optimizer import Optimizer
    from training.trainer import Trainer

T = TypeVar("T")


def recipe(name: str) -> Recipe:
    return taken("recipes", name, Recipe)


def parallelism(name: str) -> Parallelism:
    return taken("parallel", name, Parallelism)


def communication(name: str) -> Communication:
    return taken("comm", name, Communication)


def taken(folder: str, name: str, contract: type[T]) -> T:
    """The module of that name; ChoiceError if there is none, or it lacks what every one must have. Read once."""
    return choices.once(("contract", folder, name), lambda: _read(folder, name, contract))


def _read(folder: str, name: str, contract: type[T]) -> T:
    """The module by what it defines; ChoiceError if it lacks what every one must have."""
    module = importlib.import_module(f"training.{folder}.{name}")
    known = fields(contract)  # type: ignore[arg-type]
    found = {field.name: getattr(module, field.name) for field in known if hasattr(module, field.name)}
    for field in known:
        if field.default is MISSING and field.name not in found:
            raise ChoiceError(f"{module.__file__}: no `{field.name}`, which every {contract.__name__.lower()} has")
    return contract(**found)


# What modules that leave something out are taken to mean.


def _anything(shape: Shape, **options: object) -> None:
    """Nothing is refused."""


def _no_misfit(config: Asked, shape: Shape) -> Iterable[Misfit]:
    return ()


def _no_dims(**options: object) -> Dims | None:
    return None


def _no_labels(data: Path, **options: object) -> Labels | None:
    return None


def _yes(**options: object) -> bool:
    return True


def _no_weights(*arguments: object, **options: object) -> Any:
    raise ChoiceError("a recipe with an option from_weights needs functions `settle` and `weights`, too")


def _plainly(model: nn.Module) -> AbstractContextManager[None]:
    return nullcontext()


def _unsurrounded(**options: object) -> AbstractContextManager[object]:
    return nullcontext()


def _whole(batch: Batch, mesh: DeviceMesh) -> Batch:
    return batch


def _no(**options: object) -> bool:
    return False


def _one(share: int, shape: Shape, **options: object) -> int:
    return 1


def _nothing(**options: object) -> int:
    return 0


@dataclass(frozen=True)
class Recipe:
    """What is trained, on what data."""

    prepare: Callable[..., Prepared]
    """(cache, identity, [tell], **options): the data on disk, made where they are not there yet.

    `identity`: of the very data that a checkpoint was trained on; None: whatever the options say now. `tell`, if it is
    declared, is to be called every few seconds with what is said of the progress, so that nobody takes it for stuck.
    DataError, naming the option, for what can't be used.
    """
    build: Callable[..., Task]
    """(data, **options): the model and its samples; on every rank, from what `prepare` made."""
    dims: Callable[..., Dims | None] = _no_dims
    """(**options): the model's sizes, for axes that cut it and to estimate memory; ValueError if they don't fit
    together. None: it has none that anybody knows, and only the batch is divided over ranks."""
    knows_sizes: Callable[..., bool] = _yes
    """(**options): whether the options settle `dims`; False: weights that it starts from will, where they lie."""
    check: Callable[[Asked, Shape], Iterable[Misfit]] = _no_misfit
    """What of its options can't work together, or on this shape, known without opening a file."""
    settle: Callable[..., dict[str, Value]] = _no_weights
    """(path, **options): the options as the weights at `path` make them; DataError where they say otherwise."""
    weights: Callable[[Path, Path], Callable[[str], Tensor | None]] = _no_weights
    """(weights, data): name of a parameter → the whole of it, mapped; None: the seed gives it."""
    labels: Callable[..., Labels | None] = _no_labels
    """(data, **options): what a federation divides the samples by; None: it can't be divided. Without torch."""
    has_owners: Callable[..., bool] = _no
    """(**options): whether `labels` tells to whom each sample belongs by nature."""
    OWN: bool = False
    """`prepare`, `labels` and `build` are given somebody's own client.py first, as an object (`of`)."""
    SHIPPED: bool = False
    """The data come with it: `prepare` makes nothing, and anybody may look at them."""

    def of(self, own: object) -> Recipe:
        """The same, given what it is about."""
        given = {name: partial(getattr(self, name), own) for name in ("prepare", "labels", "build")}
        return replace(self, **given)  # type: ignore[arg-type]

    def prepared(
        self, cache: Path, identity: str | None, options: Mapping[str, Value], *, tell: Callable[..., None]
    ) -> Prepared:
        """What its own `prepare` makes of those options of a run that it declares."""
        given: dict[str, Any] = _declared(self.prepare, options)
        if "tell" in inspect.signature(self.prepare).parameters:
            given["tell"] = tell
        return self.prepare(cache, identity, **given)

    def labelled(self, data: Path, options: Mapping[str, Value]) -> Labels | None:
        """What its own `labels` makes of those options of a run that it declares."""
        return self.labels(data, **_declared(self.labels, options))

    def built(self, data: Path, options: Mapping[str, Value]) -> Task:
        """What its own `build` makes of those options of a run that it declares."""
        return self.build(data, **_declared(self.build, options))


@dataclass(frozen=True)
class Parallelism:
    """What is done with the ranks along its axes."""

    apply: Callable[..., nn.Module]
    """(model, mesh, **options): the model, or one stage of it, as it is called from then on. An option called `dtype`
    that is left out takes the run's."""
    check: Callable[..., None] = _anything
    """(shape, **options): raises shape.Misfit with the nearest value that works. Without torch."""
    accumulating: Callable[[nn.Module], AbstractContextManager[None]] = _plainly
    """Surrounds every micro-batch of a step but the last: gradients add up and are not exchanged yet."""
    surrounding: Callable[..., AbstractContextManager[object]] = _unsurrounded
    """(**options): around forward, loss and backward."""
    divide: Callable[[Batch, DeviceMesh], Batch] = _whole
    """What of its samples a rank looks at."""
    has_own_tokens: Callable[..., bool] = _no
    """(**options): whether its ranks hold different tokens of a sample where random numbers are drawn, and so draw
    different ones; else they hold the same, and draw the same."""
    micro_batches: Callable[..., int] = _one
    """(share, shape, **options): into how many a coordinate's share of the batch is cut where the run doesn't say."""
    forward_backward: Callable[..., Tensor] | None = None
    """(task, model, micro_batches, accumulating): instead of step.arithmetic's; see there."""
    score: Callable[..., dict[str, Tensor]] | None = None
    """(task, model, batch): instead of the task's own, where a rank alone can't."""
    optimizer: Callable[..., Optimizer] | None = None
    """(named parameters, mesh, weight_decay=…): instead of AdamW on what this rank has."""
    WITHOUT_WEIGHTS: bool = False
    """May be applied before the weights have memory, so that no rank ever holds the whole model."""


@dataclass(frozen=True)
class Communication:
    """How replicas stay one model, or become one again."""

    exchange: Callable[..., Exchange]
    """(peers, **options): what they send each other."""
    check: Callable[..., None] = _anything
    """(shape, **options): raises shape.Misfit. Without torch."""
    trainer: Callable[[], type[Trainer]] | None = None
    """A loop of its own, instead of the trainer's."""
    keeps: Callable[..., int] = _nothing
    """(**options): bytes of memory for each number that is trained, beside what training without it takes."""
    REMEMBERS: bool = False
    """Whether gradients of several steps are added up."""


def _declared(function: Callable[..., object], options: Mapping[str, Value]) -> dict[str, Value]:
    """Those of a recipe's options that this function of it declares (each has a default: training.config.choices)."""
    function = getattr(function, "func", function)  # of a recipe that is given what it is about
    declared: Sequence[str] = list(getattr(function, "__kwdefaults__", None) or ())
    return {name: value for name, value in options.items() if name in declared}
