"""Results of a question to a round's clients: the outcome by client, sums, and costs."""

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
    """Outcomes of one question by client, ordered by rank and then by computation; arrays are (clients,)."""

    clients: Ids
    losses: NDArray[np.float64]
    is_fine: NDArray[np.bool_]
    """Whether the client answered with finite numbers."""
    failed: dict[int, str]
    """Tracebacks by client."""
    seconds: dict[int, float] = field(default_factory=dict)
    """Compute time by client, of those that were not stacked with others."""

    @classmethod
    def joined(cls, parts: Sequence[ClientOutcomes]) -> ClientOutcomes:
        return cls(
            clients=np.concatenate([np.zeros(0, dtype=np.int64), *(part.clients for part in parts)]),
            losses=np.concatenate([np.zeros(0), *(part.losses for part in parts)]),
            is_fine=np.concatenate([np.zeros(0, dtype=np.bool_), *(part.is_fine for part in parts)]),
            failed={client: text for part in parts for client, text in part.failed.items()},
            seconds={client: took for part in parts for client, took in part.seconds.items()},
        )

    @property
    def broken(self) -> list[int]:
        """Return the clients that answered with NaN or infinity."""
        return [client for client in self.clients[~self.is_fine].tolist() if client not in self.failed]


@dataclass
class Answer:
    """Sums of the clients' answers in float64, identical on every rank."""

    sum: Mapping[str, Tensor]
    """Every answer at full weight, however late: clients update their own state at full weight, too."""
    mean: Mapping[str, Tensor]
    """The weighted mean, in which late answers are discounted."""
    facts: ClientOutcomes
    selected: int
    """Number of clients whose answers count, late ones included."""
    samples: float
    discount: float
    """Mean factor over samples by which late answers are discounted; 1 if none was late."""


@dataclass
class Costs:
    """Time and traffic of a round so far."""

    compute_seconds: float = 0.0
    wait_seconds: float = 0.0
    transfer_seconds: float = 0.0
    traffic: Traffic = field(default_factory=Traffic.none)
