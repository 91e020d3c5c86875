"""Results of a question to a round's clients: facts by client, sums, and costs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from training.federated.messages import Traffic
from training.federated.schedule import Ids


@dataclass
class Facts:
    """What is known of the clients of one question, by rank, then in the order in which they were computed."""

    clients: Ids
    losses: NDArray[np.float64]
    is_fine: NDArray[np.bool_]
    """It answered, with numbers."""
    failed: dict[int, str]
    """Client → its traceback."""
    seconds: dict[int, float] = field(default_factory=dict)
    """What each has taken, of those that were computed by themselves."""

    @classmethod
    def joined(cls, parts: Sequence[Facts]) -> Facts:
        return cls(
            clients=np.concatenate([np.zeros(0, dtype=np.int64), *(part.clients for part in parts)]),
            losses=np.concatenate([np.zeros(0), *(part.losses for part in parts)]),
            is_fine=np.concatenate([np.zeros(0, dtype=np.bool_), *(part.is_fine for part in parts)]),
            failed={client: text for part in parts for client, text in part.failed.items()},
            seconds={client: took for part in parts for client, took in part.seconds.items()},
        )

    @property
    def broken(self) -> list[int]:
        """Those that answered, and not with numbers."""
        return [client for client in self.clients[~self.is_fine].tolist() if client not in self.failed]


@dataclass
class Answer:
    """The sums of what was answered, the same on every rank, in float64."""

    sum: Mapping[str, Tensor]
    """Every answer in full, however late: what clients keep of it changes in full, too."""
    mean: Mapping[str, Tensor]
    """Late answers count less in it."""
    facts: Facts
    selected: int
    """Clients whose answers count, late ones with them."""
    samples: float
    discount: float
    """The mean factor, over samples, by which answers to older questions count less; 1: there were none."""


@dataclass
class Costs:
    """What a round has taken so far."""

    compute_seconds: float = 0.0
    wait_seconds: float = 0.0
    transfer_seconds: float = 0.0
    traffic: Traffic = field(default_factory=Traffic.none)
