"""Results of a task over a round's clients: the outcome by client, sums, and costs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from training.federated.messages import Traffic
from training.federated.schedule import Ids


@dataclass
class ClientOutcomes:
    """Outcomes of one task by client, ordered by rank and then by computation; arrays are (clients,)."""

    clients: Ids
    losses: NDArray[np.float64]
    is_finite: NDArray[np.bool_]
    """Whether the client sent finite values."""
    failed: dict[int, str]
    """Tracebacks by client."""
    seconds: dict[int, float] = field(default_factory=dict)
    """Compute time by client, of those that were not stacked with others."""

    @classmethod
    def concatenate(cls, parts: Sequence[ClientOutcomes]) -> ClientOutcomes:
        return cls(
            clients=np.concatenate([np.zeros(0, dtype=np.int64), *(part.clients for part in parts)]),
            losses=np.concatenate([np.zeros(0), *(part.losses for part in parts)]),
            is_finite=np.concatenate([np.zeros(0, dtype=np.bool_), *(part.is_finite for part in parts)]),
            failed={client: text for part in parts for client, text in part.failed.items()},
            seconds={client: took for part in parts for client, took in part.seconds.items()},
        )

    @property
    def broken(self) -> list[int]:
        """Return the clients that sent NaN or infinity."""
        return [client for client in self.clients[~self.is_finite].tolist() if client not in self.failed]


@dataclass
class TaskResult:
    """Sums of what the clients sent, in float64 and identical on every rank."""

    sum: Mapping[str, Tensor]
    """Sums with every update at full weight, however late: clients also change their own state at full weight."""
    mean: Mapping[str, Tensor]
    """Weighted means, in which late updates are discounted."""
    outcomes: ClientOutcomes
    counted: int
    """Number of clients whose updates count, late ones included."""
    samples: float
    discount: float
    """Mean factor over samples by which late updates are discounted; 1 if none was late."""


@dataclass
class RoundCosts:
    """Time and traffic of a round so far."""

    compute_seconds: float = 0.0
    wait_seconds: float = 0.0
    transfer_seconds: float = 0.0
    traffic: Traffic = field(default_factory=Traffic.empty)


@dataclass
class LocalResults:
    """The results of this rank's clients in one task."""

    outcomes: list[ClientOutcomes] = field(default_factory=list)
    """By chunk."""
    updates: list[Mapping[str, Tensor]] = field(default_factory=list)
    """What was sent, by chunk, if an aggregation needs single updates instead of a sum."""
    late_rows: list[Tensor] = field(default_factory=list)
    """(clients, size): updates that arrive in a later round, by chunk."""
