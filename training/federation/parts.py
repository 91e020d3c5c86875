"""Define the interfaces of a federation's exchangeable parts: algorithm, aggregation, selection, split and so on.

Each part is a module in a folder of training/federated/. `training.contracts.load_contract` reads it into one of the
classes below: a function or constant of the module becomes the field of the same name, and the field's default stands
in for what the module leaves out. The portal reads these modules too, so what it calls must work without torch. An
algorithm's constant `PACES` (the paces that it supports) is read without importing anything.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from training.contracts import load_contract

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor, nn

    from training.config.choices import Value
    from training.config.shape import Misfit
    from training.data import Batch, Task
    from training.federated.filter_context import FilterContext
    from training.federation.config import FederationConfig
    from training.federation.round_plan import RoundPlan


def algorithm(name: str) -> Algorithm:
    return load_contract("federated.algorithms", name, Algorithm)


def aggregation(name: str) -> Aggregation:
    return load_contract("federated.aggregation", name, Aggregation)


def selection(name: str) -> Selection:
    return load_contract("federated.selection", name, Selection)


def split(name: str) -> DataSplit:
    return load_contract("federated.split", name, DataSplit)


def pace(name: str) -> Pace:
    return load_contract("federated.pace", name, Pace)


def learning_rate(name: str) -> LearningRate:
    return load_contract("federated.learning_rate", name, LearningRate)


def attack(name: str) -> Attack:
    return load_contract("federated.attack", name, Attack)


def adapters(name: str) -> Adapters:
    return load_contract("federated.adapters", name, Adapters)


def filter_(name: str) -> Filter:
    return load_contract("federated.filters", name, Filter)


class TooFewUpdates(ValueError):
    """Fewer updates are left than an aggregation can work with: the round is tried again with other clients."""


TooFew = TooFewUpdates
"""Deprecated name of TooFewUpdates, which aggregation.py files may still import."""


# Defaults for what a module leaves out.


def _no_misfit(config: FederationConfig) -> Iterable[Misfit]:
    return ()


def _keeps_nothing(model: Tensor, **options: object) -> Mapping[str, Tensor]:
    return {}


def _keeps_no_more(given: Tensor, received: Tensor, context: FilterContext, **options: object) -> Mapping[str, Tensor]:
    return {}


def _adds_nothing(task: Task, clients: int, **options: object) -> None:
    """Leave the model as the recipe built it."""


def _nobody(model: nn.Module, **options: object) -> Collection[str]:
    return ()


def _add_mean_update(server: Any, **options: object) -> Tensor:
    next_model: Tensor = server.model + server.mean["delta"]
    return next_model


def _same_model(model: Tensor, state: Mapping[str, Tensor], **options: object) -> Tensor:
    return model


@dataclass(frozen=True)
class Algorithm:
    """An optimisation algorithm: what a client computes and sends in a round, and how the server combines it.

    Models and updates are flat vectors (parameters,): of all trained parameters, or of the part that is exchanged.
    `client` is a training.federated.client.Client, `server` a training.federated.server.ServerRound, `controller` a
    training.federated.controller.Controller.
    """

    train: Callable[..., Mapping[str, Tensor]]
    """(client, **options): train one client and return what it sends, by the names in SENT."""
    SENT: Mapping[str, str]
    """Names of what a client sends, each with the weights of its sum: "samples", or "clients" for equal weights."""
    aggregate: Callable[..., Tensor] = _add_mean_update
    """(server, **options): return the next shared model, given the sums of what the clients sent. Default: FedAvg's."""
    run_round: Callable[..., Tensor] | None = None
    """(controller, **options): the same for an algorithm that needs several exchanges in a round."""
    fold: Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]] | None = None
    """(what one client sent): return what the server sums of it, under the same names. None: it sums that itself."""
    initial_client_state: Callable[..., Mapping[str, Tensor]] = _keeps_nothing
    """(model, **options): return a client's initial state by name, which it keeps from round to round."""
    initial_server_state: Callable[..., Mapping[str, Tensor]] = _keeps_nothing
    """(model, **options): return the server's initial state by name, in float64."""
    extend_model: Callable[..., None] = _adds_nothing
    """(task, clients, **options): add to the task's model what is trained with it. Raises ConfigError."""
    personal: Callable[..., Collection[str]] = _nobody
    """(model, head=…, **options): return the names of tensors that stay with each client. `head`: see data.Task."""
    share: Callable[..., Mapping[str, Tensor]] | None = None
    """(running statistics by name, samples, **options): return those that a client sends. None: it sends them all."""
    personalized_model: Callable[..., Tensor] = _same_model
    """(model, state, **options): return the model that a client uses in the end, and is evaluated with."""
    check: Callable[..., Iterable[Misfit]] = _no_misfit
    """(config): yield the settings that it does not work with, without torch."""
    BROADCAST: tuple[str, ...] = ()
    """Names of the server state that is sent with the model, in the model's dtype."""
    CHOOSES_WEIGHTS: bool = False
    """Whether its option `weights` chooses the weights of sums: "samples", as in SENT, or "equal"."""
    SUMS_CLIENT_STATE: bool = False
    """Whether the server has to sum exactly the updates that clients apply to their own state (control variates): none
    may then be rejected, or changed on its way."""
    EVALUATES_SERVER_MODEL: bool = False
    """Whether the server's model is evaluated along with the clients' own ones; mean metrics are the server's."""
    TAKES_STEPS: bool = True
    """Whether clients iterate over their data in batches; otherwise they send a "loss" over all of it."""
    NEEDS_PERSONAL_TENSORS: bool = False
    """Whether it is useless for a model without `personal` tensors."""
    NEEDS_HEAD: bool = False
    """Whether it needs the model's head, or the features that enter it (data.Task.head)."""
    USES_ALL_SAMPLES: bool = False
    """Whether clients compute the loss over all of their data."""
    ALLOWS_MOMENTUM: bool = True
    """Whether its update rule allows momentum on the clients (`client_momentum`)."""
    ALLOWS_WEIGHT_DECAY: bool = True
    """Whether its clients' steps apply `client_weight_decay`, as those of Client.descend do."""
    ACCEPTS_PARTIAL_WORK: bool = False
    """Whether a client that is too slow may send the steps that it has finished."""

    def sent(self, options: Mapping[str, object]) -> Mapping[str, str]:
        """Return SENT with the weights that these options choose."""
        is_equal = self.CHOOSES_WEIGHTS and options.get("weights") == "equal"
        return dict.fromkeys(self.SENT, "clients") if is_equal else self.SENT

    @property
    def has_client_state(self) -> bool:
        """Return whether clients have state that lasts from round to round."""
        return self.initial_client_state is not _keeps_nothing or self.personal is not _nobody

    @property
    def has_personalized_model(self) -> bool:
        """Return whether a client uses another model in the end than the server's."""
        return self.personalized_model is not _same_model


@dataclass(frozen=True)
class Aggregation:
    """A rule that combines the updates of a round into one."""

    combine: Callable[..., tuple[Tensor, Sequence[int]]]
    """(rows (clients, parameters), weights (clients,), **options): return one row, and the indices of those rejected.

    Rows are in the order of the client ids, in the model's dtype and finite; weights and the returned row are
    float64. Never all rows are rejected. Raises TooFewUpdates where there are too few to decide: the round is repeated.
    No array of shape (clients, clients, parameters) may be built."""
    check: Callable[..., Iterable[Misfit]] = _no_misfit
    """(config): yield the settings that it does not work with, without torch."""
    IS_SUM: bool = False
    """Whether it is the weighted mean: each rank sums the updates of its clients, and `combine` is not called."""
    TRUSTED: bool = False
    """Whether `combine` takes a third argument: the update (parameters,) that the server computes from
    `root_samples` samples of its own, an option. They are taken out of the validation data."""


@dataclass(frozen=True)
class Selection:
    """A rule that selects the clients of a round, without torch."""

    select: Callable[..., NDArray[np.int64]]
    """(round, **options): return client ids in ascending order, determined by the seed and the round's fields."""
    check: Callable[..., Iterable[Misfit]] = _no_misfit
    """(config): yield the settings that it does not work with, without torch."""


@dataclass(frozen=True)
class DataSplit:
    """A rule that divides samples among clients, without torch."""

    divide: Callable[..., NDArray[np.int64]]
    """(labels, clients, rng, **options): return the client of each sample, shape (samples,)."""
    view: Callable[..., Batch] | None = None
    """(batch, owners (samples,), seed, **options): return the batch as its clients see it. None: unchanged."""
    check: Callable[..., Iterable[Misfit]] = _no_misfit
    NATURAL: bool = False
    """Whether it divides by the owners of samples, which the data then have to name."""
    FORMER: tuple[tuple[str, Value], ...] = ()
    """Options by name with what each meant before it existed, for older checkpoints; where that is not the default."""


@dataclass(frozen=True)
class Pace:
    """A rule for which clients the server waits, and for how long, without torch."""

    schedule: Callable[..., RoundPlan]
    """(context, **options): plan who starts, how far each client gets, and whose updates count in this round."""
    check: Callable[..., Iterable[Misfit]] = _no_misfit


@dataclass(frozen=True)
class LearningRate:
    """A schedule of the clients' learning rate, without torch."""

    factor: Callable[..., float]
    """(round from 1, rounds of the run, **options): return the factor on the run's learning rate in this round. It
    depends on nothing else, so that a resumed run continues with the same rates."""
    check: Callable[..., Iterable[Misfit]] = _no_misfit


@dataclass(frozen=True)
class Attack:
    """An attack by some of the clients, to test robust aggregations with."""

    forge: Callable[..., Tensor]
    """(updates (attackers, parameters) float64, knowledge (attack_simulation.AttackerKnowledge), **options): return the
    forged updates, in the same shape."""
    relabel: Callable[..., Tensor] | None = None
    """(labels (samples,), classes (classes,) ascending, **options): return the labels that attackers train on."""
    check: Callable[..., Iterable[Misfit]] = _no_misfit
    """(config): yield the settings that it does not work with, without torch."""
    CHANGES_UPDATES: bool = True
    """Whether `forge` changes anything."""
    COLLUDES: bool = False
    """Whether `forge` needs the honest clients' updates; each rank then stores those of all its clients."""


@dataclass(frozen=True)
class Adapters:
    """A choice of the weights that are trained and exchanged."""

    adapt: Callable[..., Task]
    """(task, **options): return the task with what is trained added and the rest frozen, before memory is allocated."""
    check: Callable[..., Iterable[Misfit]] = _no_misfit
    """(config): yield the settings that it does not work with, without torch."""
    constants: Callable[[nn.Module], Collection[str]] = _nobody
    """(model): return the names of frozen tensors that checkpoints contain nevertheless."""
    KEEPS_BASE: bool = False
    """Whether frozen weights are stored once, next to the checkpoints, instead of in each."""


@dataclass(frozen=True)
class Filter:
    """A transformation of updates before they are sent, for several clients at once, a row each.

    Its result for a row may depend only on the row, on `context` (training.federated.filter_context: clients,
    round and their state) and on its options: never on other rows.
    """

    send: Callable[..., tuple[Tensor, Mapping[str, Tensor]]]
    """(given (clients, size), context, **options): return the values to send, which the next filter takes, and by
    name whatever else is sent; (clients, …) each."""
    receive: Callable[..., Tensor]
    """(values, extras, context, **options): return the updates (clients, size) as the server reads them. Raises
    ValueError for what `send` never returns; NaN and infinity are passed on."""
    begin: Callable[..., Mapping[str, Tensor]] = _keeps_nothing
    """(row (size,), **options): return the initial state of a client, and of the server for it, by name."""
    keep: Callable[..., Mapping[str, Tensor]] = _keeps_no_more
    """(given, received, context, **options): return their new state, (clients, …), once the server has read `received`
    for what was given. Later filters have changed it, too."""
    check: Callable[..., Iterable[Misfit]] = _no_misfit
    """(config): yield the settings that it does not work with, without torch."""
    STAGE: str = ""
    """Its stage in federation.filter_order.STAGES; a run has at most one filter of each, in that order."""
    SUM_ONLY: bool = False
    """Whether the server learns only the sum of all updates."""
