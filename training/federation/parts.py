"""What a module of federated/*/ may define, and what holds where it leaves something out.

Modules are taken as those of all runs are (training.contracts): by the names of their functions and constants, and
without torch for what the portal asks. An algorithm's constant `PACES` (those that it is for) is read without importing
anything.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from training.contracts import taken

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor, nn

    from training.config.choices import Value
    from training.config.shape import Misfit
    from training.data import Batch, Task
    from training.federated.filtering import Passing
    from training.federation.config import FederationConfig
    from training.federation.pacing import Plan


def algorithm(name: str) -> Algorithm:
    return taken("federated.algorithms", name, Algorithm)


def aggregation(name: str) -> Aggregation:
    return taken("federated.aggregation", name, Aggregation)


def selection(name: str) -> Selection:
    return taken("federated.selection", name, Selection)


def split(name: str) -> DataSplit:
    return taken("federated.split", name, DataSplit)


def pace(name: str) -> Pace:
    return taken("federated.pace", name, Pace)


def learning_rate(name: str) -> LearningRate:
    return taken("federated.learning_rate", name, LearningRate)


def attack(name: str) -> Attack:
    return taken("federated.attack", name, Attack)


def adapters(name: str) -> Adapters:
    return taken("federated.adapters", name, Adapters)


def filter_(name: str) -> Filter:
    return taken("federated.filters", name, Filter)


class TooFew(ValueError):
    """Fewer updates are left than an aggregation can work with: the round is tried again with other clients."""


# What modules that leave something out are taken to mean.


def _no_misfit(config: FederationConfig) -> Iterable[Misfit]:
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
    check: Callable[..., Iterable[Misfit]] = _no_misfit
    """(config): what it can't work with. Without torch."""
    BROADCAST: tuple[str, ...] = ()
    """Of what the server remembers, that which it sends with the model, in the model's dtype."""
    CHOOSES_WEIGHTS: bool = False
    """Whether its option `weights` says what sums are weighted by: "samples", as in SENT, or "equal"."""
    ADDS_UP_KEPT: bool = False
    """Whether the server adds up the very updates by which clients change what they keep: then none may be left out, or
    changed on its way."""
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
    MOMENTUM: bool = True
    """Whether its rule allows clients to take their steps with momentum (`client_momentum`)."""
    WEIGHT_DECAY: bool = True
    """Whether its clients' steps take `client_weight_decay`: those of Client.descend do."""
    PARTIAL: bool = False
    """Whether a client that was too slow may send what it has come to."""

    def sent(self, options: Mapping[str, object]) -> Mapping[str, str]:
        """Return what leaves a client and what its sum is weighted by, with these options."""
        is_equal = self.CHOOSES_WEIGHTS and options.get("weights") == "equal"
        return dict.fromkeys(self.SENT, "clients") if is_equal else self.SENT

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
    raises TooFew where it can't tell: the round is tried again. Nothing is made (clients, clients, numbers)."""
    check: Callable[..., Iterable[Misfit]] = _no_misfit
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
    check: Callable[..., Iterable[Misfit]] = _no_misfit


@dataclass(frozen=True)
class DataSplit:
    """Which client has which samples. Without torch."""

    divide: Callable[..., NDArray[np.int64]]
    """(labels, clients, draw, **options): the client of each sample."""
    view: Callable[..., Batch] | None = None
    """(batch, owners (samples,), seed, **options): samples as their clients see them. None: as they are."""
    check: Callable[..., Iterable[Misfit]] = _no_misfit
    NATURAL: bool = False
    """Whether it goes by the owners of samples, and so needs them known."""
    FORMER: tuple[tuple[str, Value], ...] = ()
    """Options by name, and what each stands for in a checkpoint that is older than it, where that is no default."""


@dataclass(frozen=True)
class Pace:
    """For whom the server waits, and how long. Without torch."""

    schedule: Callable[..., Plan]
    """(scene, **options): who starts, how far each comes, and whose updates count in this round."""
    check: Callable[..., Iterable[Misfit]] = _no_misfit


@dataclass(frozen=True)
class LearningRate:
    """How the clients' learning rate changes. Without torch."""

    factor: Callable[..., float]
    """(round from 1, rounds of the run, **options): what the run's rate is multiplied by in this round. A function of
    nothing else, so that a resumed run continues with the same rates."""
    check: Callable[..., Iterable[Misfit]] = _no_misfit


@dataclass(frozen=True)
class Attack:
    """What clients that attack do."""

    forge: Callable[..., Tensor]
    """(updates (attackers, numbers) float64, known (training.federated.attacking.Knowledge), **options): what they send
    instead, of the same shape."""
    relabel: Callable[..., Tensor] | None = None
    """(labels (samples,), classes (classes,) ascending, **options): the labels that they train on instead."""
    check: Callable[..., Iterable[Misfit]] = _no_misfit
    """(config): what it can't work with. Without torch."""
    CHANGES_UPDATES: bool = True
    """Whether `forge` changes anything."""
    COLLUDES: bool = False
    """Whether `forge` needs the updates of the clients that do not attack. Each rank then holds all of its clients'."""


@dataclass(frozen=True)
class Adapters:
    """Which weights are trained and travel."""

    adapt: Callable[..., Task]
    """(task, **options): the task, its model still without memory: what is trained is in it, the rest is frozen."""
    check: Callable[..., Iterable[Misfit]] = _no_misfit
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
    check: Callable[..., Iterable[Misfit]] = _no_misfit
    """(config): what it can't work with. Without torch."""
    STAGE: str = ""
    """Which of federation.filter_order.STAGES it is: of each there may be one, in their order."""
    SUM_ONLY: bool = False
    """The server learns nothing but the sum of all updates."""
