"""Plan rounds: which clients start, how far each of them gets, and whose updates count. No torch.

Virtual clients have no clock, so it is simulated: a client's time follows from the seed, the round and its number, and
a run has the same rounds on any machine.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from training.federation.speeds import seconds_of, speeds

Ids = NDArray[np.int64]


def steps_of(samples: NDArray[np.int64], batch: int, *, epochs: int | None, local_steps: int | None) -> Ids:
    """Return how many steps each client takes in a round: `local_steps`, or `epochs` times its number of batches."""
    if local_steps is not None:
        return np.full(len(samples), local_steps, dtype=np.int64)
    assert epochs is not None
    return -(-samples // batch) * epochs


@dataclass(frozen=True)
class UpdatesInFlight:
    """Updates that were started in earlier rounds and have not arrived."""

    clients: Ids
    started: Ids
    """The round in which each began."""
    arrives: NDArray[np.float64]
    """When each arrives, by the simulated clock in seconds."""

    def arriving_by(self, until: float) -> Ids:
        """Return the clients whose updates have arrived by then, ascending."""
        found: Ids = np.sort(self.clients[self.arrives <= until])
        return found


@dataclass(frozen=True)
class PaceContext:
    """The input of a pace: the round, the clock, and the updates in flight."""

    seed: int
    round: int
    now: float
    """The simulated clock as the round begins, in seconds."""
    wanted: int
    """Clients of a round."""
    select: Callable[[int, Ids], Ids]
    """(how many, clients to leave out) → the selected clients, ascending."""
    full_steps: Callable[[Ids], Ids]
    """Steps of a whole round of these clients."""
    flight: UpdatesInFlight
    is_partial: bool
    """Whether the algorithm accepts the finished steps of a slow client."""

    def seconds(self, clients: Ids) -> NDArray[np.float64]:
        """Return the time of each client for all its steps in this round, in seconds."""
        return seconds_of(self.seed, self.round, clients, self.full_steps(clients))

    def usual_seconds(self, clients: Ids) -> NDArray[np.float64]:
        """Return the expected time of each client for all its steps, in seconds."""
        found: NDArray[np.float64] = (
            self.full_steps(clients) / speeds(self.seed, int(clients.max(initial=0)) + 1)[clients]
        )
        return found


@dataclass
class RoundPlan:
    """The plan of one round: which clients start, and whose updates count."""

    round: int
    clients: Ids
    """The clients that start from the current model and compute something, ascending."""
    steps: Ids
    """Steps of each client."""
    later: Ids = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    """Those of them whose updates arrive in a later round."""
    later_at: NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))
    """When these arrive, by the simulated clock in seconds."""
    arriving: Ids = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    """Clients whose updates of earlier rounds count in this one, ascending."""
    staleness_exponent: float = 0.0
    """An update that is τ rounds old counts (1 + τ)^-exponent."""
    too_slow: Ids = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    """Clients that were selected and given up: nothing is computed for them."""
    ends_at: float | None = None
    """The simulated clock as the round ends, in seconds; None if the pace has no clock."""
    seconds: dict[int, float] = field(default_factory=dict)
    """The time of each client by the simulated clock, in seconds."""
    quorum: int = 1
    """Number of updates without which there is no new model."""

    def counts_in_round(self, clients: Ids) -> NDArray[np.bool_]:
        """Return whether the update of each client, started in this round, counts in it."""
        return ~np.isin(clients, self.later)

    def arrival_times(self, clients: Ids) -> NDArray[np.float64]:
        at = dict(zip(self.later.tolist(), self.later_at.tolist(), strict=True))
        return np.array([at[client] for client in clients.tolist()])
