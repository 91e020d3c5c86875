"""The server's side of a federation: the model and what it remembers, the same on every rank; and what clients keep."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from training.federated.client_state import ClientState
from training.federated.model import PERSONAL, STATISTICS, Model
from training.federated.pending_updates import Pending
from training.runtime.distributed import World

if TYPE_CHECKING:
    from training.federated.task_results import Answer

QUARANTINED_AFTER = 3
"""Updates that were no numbers, after which a client is not asked again."""


@dataclass
class Round:
    """What an algorithm's `aggregate` sees of a round: sums in float64, and what the server remembers."""

    model: Tensor
    """(numbers,) float64: the shared part, as the round began."""
    sum: Mapping[str, Tensor]
    """Weighted, by the names in SENT; late updates in full. For what must equal what the clients keep."""
    mean: Mapping[str, Tensor]
    """Late updates count less. For steps of the model."""
    memory: dict[str, Tensor]
    """What the server remembers: to be replaced."""
    number: int
    """From 1."""
    selected: int
    """Clients whose updates count."""
    clients: int
    """All that there are."""
    discount: float
    """The mean factor, over samples, by which late updates count less; 1: there are none."""


class Server:
    """The state of a federation between two rounds."""

    def __init__(
        self, model: Model, samples: NDArray[np.int64], start: Tensor, statistics: Tensor, world: World
    ) -> None:
        """`samples`: of each client; `start`: (numbers,) all weights as the seed gives them; `statistics`: all running
        ones."""
        clients = len(samples)
        shared = model.weights.shared
        algorithm, options = model.algorithm, model.options
        self._model = model
        self.clients = clients
        self.weights = start.clone()
        """(numbers,): the personal part stays what the seed gave."""
        self.statistics = statistics.clone()
        self.memory = {n: v.double().contiguous() for n, v in algorithm.memory(start[:shared], **options).items()}
        """What the algorithm remembers, float64 by name."""
        begun = dict(algorithm.begin(start[:shared], **options))
        if shared < len(start):
            begun[PERSONAL] = start[shared:]
        if len(statistics) and not model.statistics.shared:
            begun[STATISTICS] = statistics
        self.kept = ClientState(clients, world)
        """(clients, …) by name: what each client keeps, this rank's share of the clients."""
        self.kept.initialize(begun)
        self.clock = 0.0
        """The simulated clock, where the pace has one; seconds."""
        self.pending = Pending(samples, 0, start)
        """Updates on their way."""
        self.losses = np.full(clients, np.nan)
        """The mean loss of each client's batches when it last trained."""
        self.last_rounds = np.zeros(clients, dtype=np.int64)
        """The round in which each client was last asked to train; 0: in none yet."""
        self.broken = np.zeros(clients, dtype=np.int64)
        """How many of each client's updates were no numbers."""

    @property
    def shared(self) -> Tensor:
        return self.weights[: self._model.weights.shared]

    @property
    def broadcast(self) -> dict[str, Tensor]:
        """What is sent with the model, by name."""
        return {name: self.memory[name].to(self._model.dtype) for name in self._model.algorithm.BROADCAST}

    @property
    def eligible(self) -> NDArray[np.int64]:
        """The clients that may be asked."""
        return np.flatnonzero(self.broken < QUARANTINED_AFTER)

    def round(self, number: int, answer: Answer) -> Round:
        """What `aggregate` sees."""
        return Round(
            model=self.shared.double().clone(),
            sum=answer.sum,
            mean=answer.mean,
            memory=self.memory,
            number=number,
            selected=answer.selected,
            clients=self.clients,
            discount=answer.discount,
        )

    def state(self) -> dict[str, Any]:
        """What a checkpoint holds: the very tensors, which it is read into."""
        return self._state(self.kept.restored_tensors())

    def saved_state(self) -> dict[str, Any]:
        """The same as a save takes it: what clients keep is written without a copy."""
        return self._state(self.kept.saved_rows())

    def _state(self, clients: Mapping[str, Any]) -> dict[str, Any]:
        model = {**self._model.weights.tensors(self.weights), **self._model.statistics.tensors(self.statistics)}
        model |= self._model.constants
        parts: dict[str, Any] = {"model": model, "server": self.memory, "clients": clients}
        if len(self.pending.clients):
            parts["pending"] = {"rows": self.pending.rows}
        return {name: part for name, part in parts.items() if part}

    # What goes on from plain values in a checkpoint (training.checkpoint.remembering).

    def remember(self) -> dict[str, Any]:
        known = np.flatnonzero(~np.isnan(self.losses))
        broken = np.flatnonzero(self.broken)
        return {
            "losses": dict(zip(map(str, known.tolist()), self.losses[known].tolist(), strict=True)),
            "broken": dict(zip(map(str, broken.tolist()), self.broken[broken].tolist(), strict=True)),
            "last_rounds": self.last_rounds.tolist(),
            "clock": self.clock,
            "pending": self.pending.remember(),
        }

    def recall(self, told: Mapping[str, Any]) -> None:
        for client, loss in (told.get("losses") or {}).items():
            self.losses[int(client)] = loss
        for client, count in (told.get("broken") or {}).items():
            self.broken[int(client)] = count
        if last_rounds := told.get("last_rounds"):  # older checkpoints have none
            self.last_rounds[:] = last_rounds
        self.clock = float(told.get("clock") or 0.0)
        self.pending.recall(told.get("pending") or {})
