"""The server of a federation: the model and the algorithm's state, equal on every rank, and the clients' states."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from training.federated.client_state import ClientState
from training.federated.model import PERSONAL, STATISTICS, Model
from training.federated.pending_updates import PendingUpdates
from training.runtime.distributed import World

if TYPE_CHECKING:
    from training.federated.task_results import TaskResult

QUARANTINED_AFTER = 3
"""Number of non-finite updates after which a client is never selected again."""


@dataclass
class ServerRound:
    """A round as an algorithm's `aggregate` receives it: sums in float64, and the server's state."""

    model: Tensor
    """(parameters,) float64: the shared part of the model as the round began."""
    sum: Mapping[str, Tensor]
    """Weighted sums by the names in SENT, late updates in full: for state that must equal the sum of the clients'
    states."""
    mean: Mapping[str, Tensor]
    """Weighted means by the same names, late updates discounted: for steps of the model."""
    memory: dict[str, Tensor]
    """The server's state by name, float64. `aggregate` replaces its entries."""
    number: int
    """The number of the round, from 1."""
    counted: int
    """Number of clients whose updates count in this round."""
    clients: int
    """Number of all clients."""
    discount: float
    """Mean factor over samples by which late updates are discounted; 1 if none was late."""

    @property
    def selected(self) -> int:
        """Return `counted`. Deprecated."""
        return self.counted


class Server:
    """The state of a federation between two rounds."""

    def __init__(
        self, model: Model, samples: NDArray[np.int64], start: Tensor, statistics: Tensor, world: World
    ) -> None:
        """Start from the weights `start` (parameters,) and the running statistics `statistics` (statistics,).

        `samples` (clients,): the number of training samples of each client.
        """
        clients = len(samples)
        shared = model.weights.shared
        algorithm, options = model.algorithm, model.options
        self._model = model
        self.clients = clients
        self.weights = start.clone()
        """(parameters,): all weights. The personal part keeps its initial values here."""
        self.statistics = statistics.clone()
        server_state = algorithm.initial_server_state(start[:shared], **options)
        self.memory = {name: value.double().contiguous() for name, value in server_state.items()}
        """The algorithm's server state by name, float64."""
        initial = dict(algorithm.initial_client_state(start[:shared], **options))
        if shared < len(start):
            initial[PERSONAL] = start[shared:]
        if len(statistics) and not model.statistics.shared:
            initial[STATISTICS] = statistics
        self.client_state = ClientState(clients, world)
        """The clients' states by name, (clients, …): this rank's share of the clients."""
        self.client_state.initialize(initial)
        self.clock = 0.0
        """The simulated clock in seconds, where the pace has one."""
        self.pending = PendingUpdates(samples, 0, start)
        """Updates of earlier rounds that have not arrived yet."""
        self.losses = np.full(clients, np.nan)
        """(clients,): the mean loss of each client's batches when it last trained; NaN: never."""
        self.last_rounds = np.zeros(clients, dtype=np.int64)
        """(clients,): the round in which each client was last selected; 0: never."""
        self.broken_updates = np.zeros(clients, dtype=np.int64)
        """(clients,): how many of each client's updates were not finite."""

    @property
    def kept(self) -> ClientState:
        """Return `client_state`. Deprecated."""
        return self.client_state

    @property
    def shared(self) -> Tensor:
        """Return the part of the weights that is exchanged, (parameters,): a view."""
        return self.weights[: self._model.weights.shared]

    @property
    def eligible(self) -> NDArray[np.int64]:
        """Return the ids of the clients that may be selected, ascending."""
        return np.flatnonzero(self.broken_updates < QUARANTINED_AFTER)

    def round(self, number: int, result: TaskResult) -> ServerRound:
        """Return what an algorithm's `aggregate` receives."""
        return ServerRound(
            model=self.shared.double().clone(),
            sum=result.sum,
            mean=result.mean,
            memory=self.memory,
            number=number,
            counted=result.counted,
            clients=self.clients,
            discount=result.discount,
        )

    def state(self) -> dict[str, Any]:
        """Return the tensors that a checkpoint is read into."""
        return self._state(self.client_state.restored_tensors())

    def saved_state(self) -> dict[str, Any]:
        """Return the same for writing a checkpoint, which stores the clients' states without copying them."""
        return self._state(self.client_state.saved_rows())

    def _state(self, clients: Mapping[str, Any]) -> dict[str, Any]:
        model = {**self._model.weights.tensors(self.weights), **self._model.statistics.tensors(self.statistics)}
        model |= self._model.constants
        parts: dict[str, Any] = {"model": model, "server": self.memory, "clients": clients}
        if len(self.pending.clients):
            parts["pending"] = {"rows": self.pending.rows}
        return {name: part for name, part in parts.items() if part}

    # Plain values that a checkpoint stores as JSON (training.checkpoint.saved_state).

    def state_dict(self) -> dict[str, Any]:
        has_loss = np.flatnonzero(~np.isnan(self.losses))
        broken = np.flatnonzero(self.broken_updates)
        return {
            "losses": dict(zip(map(str, has_loss.tolist()), self.losses[has_loss].tolist(), strict=True)),
            "broken": dict(zip(map(str, broken.tolist()), self.broken_updates[broken].tolist(), strict=True)),
            "last_rounds": self.last_rounds.tolist(),
            "clock": self.clock,
            "pending": self.pending.state_dict(),
        }

    def load_state_dict(self, stored: Mapping[str, Any]) -> None:
        for client, loss in (stored.get("losses") or {}).items():
            self.losses[int(client)] = loss
        for client, count in (stored.get("broken") or {}).items():
            self.broken_updates[int(client)] = count
        if last_rounds := stored.get("last_rounds"):  # older checkpoints have none
            self.last_rounds[:] = last_rounds
        self.clock = float(stored.get("clock") or 0.0)
        self.pending.load_state_dict(stored.get("pending") or {})
