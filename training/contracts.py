"""What a module of recipes/, parallel/, comm/ or federated/*/ may define, and what holds where it leaves something out.

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
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import MISSING, dataclass, fields, replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeVar

from training.config import choices
from training.config.choices import ChoiceError, Value

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor, nn
    from torch.distributed.device_mesh import DeviceMesh

    from training.comm._exchange import Exchange
    from training.config.asked import Asked
    from training.config.dims import Dims
    from training.config.shape import Misfit, Shape
    from training.data import Batch, Labels, Prepared, Task
    from training.federated.filtering import Passing
    from training.federation.config import FederationConfig
    from training.federation.pacing import Plan
    from training.step.optimizer import Optimizer
    from training.trainer import Trainer

T = TypeVar("T")


def recipe(name: str) -> Recipe:
    return _taken("recipes", name, Recipe)


def parallelism(name: str) -> Parallelism:
    return _taken("parallel", name, Parallelism)


def communication(name: str) -> Communication:
    return _taken("comm", name, Communication)


def algorithm(name: str) -> Algorithm:
    return _taken("federated.algorithms", name, Algorithm)


def aggregation(name: str) -> Aggregation:
    return _taken("federated.aggregation", name, Aggregation)


def selection(name: str) -> Selection:
    return _taken("federated.selection", name, Selection)


def split(name: str) -> DataSplit:
    return _taken("federated.split", name, DataSplit)


def pace(name: str) -> Pace:
    return _taken("federated.pace", name, Pace)


def adapters(name: str) -> Adapters:
    return _taken("federated.adapters", name, Adapters)


def filter_(name: str) -> Filter:
    return _taken("federated.filters", name, Filter)


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


def _no_federated_misfit(config: FederationConfig) -> Iterable[Misfit]:
    return ()


def _keeps_nothing(model: Tensor, **options: object) -> Mapping[str, Tensor]:
    return {}


def _keeps_no_more(given: Tensor, received: Tensor, passing: Passing, **options: object) -> Mapping[str, Tensor]:
    return {}


def _adds_nothing(task: Task, clients: int, **options: object) -> None:
    """The model is trained as the recipe has made it."""


def _nobody(model: nn.Module, **options: object) -> Collection[str]:
    return ()


def _the_same(model: Tensor, kept: Mapping[str, Tensor], **options: object) -> Tensor:
    return model


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


@dataclass(frozen=True)
class Algorithm:
    """What clients compute and send in a round, and what the server makes of it (training.federated.client, .server).

    Vectors are (numbers,): of all that is trained, or of the part that travels.
    """

    train: Callable[..., Mapping[str, Tensor]]
    """(client, **options): what one client sends, by the names in SENT."""
    SENT: Mapping[str, str]
    """What leaves a client, by name, and what its sum is weighted by: "samples", or "clients" (each counts one)."""
    aggregate: Callable[..., Tensor] | None = None
    """(round, **options): the next model's shared part, of the sums of what the clients have sent."""
    play: Callable[..., Tensor] | None = None
    """(controller, **options): the same, where one exchange a round is not enough."""
    fold: Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]] | None = None
    """(what one client sent): what of it the server adds up, by the same names; None: that itself."""
    begin: Callable[..., Mapping[str, Tensor]] = _keeps_nothing
    """(model, **options): what a client keeps before its first round, by name."""
    memory: Callable[..., Mapping[str, Tensor]] = _keeps_nothing
    """(model, **options): what the server remembers from round to round, by name, in float64."""
    equip: Callable[..., None] = _adds_nothing
    """(task, clients, **options): adds to the task's model what is trained beside it. ConfigError if it can't be."""
    personal: Callable[..., Collection[str]] = _nobody
    """(model, head=…, **options): tensors by name that stay with each client. `head`: see data.Task."""
    share: Callable[..., Mapping[str, Tensor]] | None = None
    """(a client's running statistics by name, how many samples it has, **options): those that it sends; None: they."""
    own: Callable[..., Tensor] = _the_same
    """(model, kept, **options): what a client uses in the end, and is judged by."""
    check: Callable[..., Iterable[Misfit]] = _no_federated_misfit
    """(config): what it can't work with. Without torch."""
    BROADCAST: tuple[str, ...] = ()
    """Of what the server remembers, that which it sends with the model, in the model's dtype."""
    JUDGES_BOTH: bool = False
    """Whether the server's model is judged beside those that clients have of their own: the means are its."""
    STEPS: bool = True
    """Whether clients go through their data in batches; else they send a "loss" over everything."""
    OWNS: bool = False
    """Whether it is of no use to a model that has nothing `personal`."""
    HEAD: bool = False
    """Whether it asks for what enters the model's head, or for the head itself (data.Task.head)."""
    WHOLE: bool = False
    """Whether clients look at the loss over everything that they have."""
    PARTIAL: bool = False
    """Whether a client that was too slow may send what it has come to."""

    @property
    def keeps(self) -> bool:
        """Whether clients keep something from round to round."""
        return self.begin is not _keeps_nothing or self.personal is not _nobody


@dataclass(frozen=True)
class Aggregation:
    """How the updates of a round become one."""

    combine: Callable[..., tuple[Tensor, Sequence[int]]]
    """(rows (clients, numbers), weights (clients,), **options): one row, and which of them, never all, were left out.

    In order of the clients' numbers, in the model's dtype, all of them numbers; weights and the answer are float64. It
    raises _robust.TooFew where it can't tell: the round is tried again. Nothing is made (clients, clients, numbers)."""
    check: Callable[..., Iterable[Misfit]] = _no_federated_misfit
    """(config): what it can't work with. Without torch."""
    IS_SUM: bool = False
    """A weighted mean, taken as a sum wherever the clients are; `combine` is not asked."""
    TRUSTED: bool = False
    """`combine` wants a third: the update (numbers,) that the server makes from `root_samples` rows of its own, an
    option. They are taken from what is kept for validation, and not judged by."""


@dataclass(frozen=True)
class Selection:
    """Which clients take part in a round. Without torch."""

    select: Callable[..., NDArray[np.int64]]
    """(round, **options): numbers of clients, ascending: a function of the seed, the round and what is known."""
    check: Callable[..., Iterable[Misfit]] = _no_federated_misfit


@dataclass(frozen=True)
class DataSplit:
    """Which client has which samples. Without torch."""

    divide: Callable[..., NDArray[np.int64]]
    """(labels, clients, draw, **options): the client of each sample."""
    view: Callable[..., Batch] | None = None
    """(batch, owners (samples,), seed, **options): samples as their clients see them. None: as they are."""
    check: Callable[..., Iterable[Misfit]] = _no_federated_misfit
    NATURAL: bool = False
    """Whether it goes by the owners of samples, and so needs them known."""


@dataclass(frozen=True)
class Pace:
    """For whom the server waits, and how long. Without torch."""

    schedule: Callable[..., Plan]
    """(scene, **options): who starts, how far each comes, and whose updates count in this round."""
    check: Callable[..., Iterable[Misfit]] = _no_federated_misfit


@dataclass(frozen=True)
class Adapters:
    """Which weights are trained and travel."""

    adapt: Callable[..., Task]
    """(task, **options): the task, its model still without memory: what is trained is in it, the rest is frozen."""
    check: Callable[..., Iterable[Misfit]] = _no_federated_misfit
    """(config): what it can't work with. Without torch."""
    constants: Callable[[nn.Module], Collection[str]] = _nobody
    """(model): what is frozen, and lies in checkpoints all the same."""
    BESIDE: bool = False
    """What is trained is beside weights that stay, which are kept once, beside the checkpoints."""


@dataclass(frozen=True)
class Filter:
    """What is done to an update before it is sent, for several clients at once: a row each.

    What it makes of a row must not depend on the rows beside it, nor on anything but the row, `passing`
    (training.federated.filtering: who, in which round, and what each keeps) and its options.
    """

    send: Callable[..., tuple[Tensor, Mapping[str, Tensor]]]
    """(given (clients, numbers), passing, **options): the values that are sent, on which the next filter works, and by
    name what is sent beside them; (clients, …) each."""
    receive: Callable[..., Tensor]
    """(values, beside, passing, **options): (clients, numbers) again, as the server takes them. ValueError for what
    `send` would never make; a number that is none stays none."""
    begin: Callable[..., Mapping[str, Tensor]] = _keeps_nothing
    """(row (numbers,), **options): what a client, and the server of it, keeps before its first round, by name."""
    keep: Callable[..., Mapping[str, Tensor]] = _keeps_no_more
    """(given, received, passing, **options): what they keep from now on, (clients, …), once the server has taken
    `received` for what was given. Filters after this one have had their part in it."""
    check: Callable[..., Iterable[Misfit]] = _no_federated_misfit
    """(config): what it can't work with. Without torch."""
    STAGE: str = ""
    """Which of federation.filter_order.STAGES it is: of each there may be one, in their order."""
    SUM_ONLY: bool = False
    """The server learns nothing but the sum of all updates."""


def _taken(folder: str, name: str, contract: type[T]) -> T:
    return choices.once(("contract", folder, name), lambda: _read(folder, name, contract))


def _read(folder: str, name: str, contract: type[T]) -> T:
    return read(importlib.import_module(f"training.{folder}.{name}"), contract)


def read(module: ModuleType, contract: type[T]) -> T:
    """The module by what it defines; ChoiceError if it lacks what every one must have."""
    known = fields(contract)  # type: ignore[arg-type]
    found = {field.name: getattr(module, field.name) for field in known if hasattr(module, field.name)}
    for field in known:
        if field.default is MISSING and field.name not in found:
            raise ChoiceError(f"{module.__file__}: no `{field.name}`, which every {contract.__name__.lower()} has")
    return contract(**found)


def _declared(function: Callable[..., object], options: Mapping[str, Value]) -> dict[str, Value]:
    """Those of a recipe's options that this function of it declares (each has a default: training.config.choices)."""
    function = getattr(function, "func", function)  # of a recipe that is given what it is about
    declared: Sequence[str] = list(getattr(function, "__kwdefaults__", None) or ())
    return {name: value for name, value in options.items() if name in declared}
