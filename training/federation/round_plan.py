"""For whom the server waits: who starts in a round, how far each comes, and whose updates count in it. No torch.

Virtual clients have no clock of their own, so theirs is simulated: what a client takes follows from the seed, the round
and its number, and the same run comes to the same rounds wherever it is computed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from training.federation.speeds import seconds_of, speeds

Ids = NDArray[np.int64]


def steps_of(samples: NDArray[np.int64], batch: int, *, epochs: int | None, local_steps: int | None) -> Ids:
    """How many steps each client takes: so many, or `epochs` times through what it has."""
    if local_steps is not None:
        return np.full(len(samples), local_steps, dtype=np.int64)
    assert epochs is not None
    return -(-samples // batch) * epochs


@dataclass(frozen=True)
class Flight:
    """Updates that were begun in earlier rounds and have not arrived."""

    clients: Ids
    started: Ids
    """The round in which each began."""
    arrives: NDArray[np.float64]
    """By the simulated clock."""

    def arriving_by(self, ends: float) -> Ids:
        """Whose updates are there by then, ascending."""
        found: Ids = np.sort(self.clients[self.arrives <= ends])
        return found


@dataclass(frozen=True)
class Scene:
    """What a pace may go by."""

    seed: int
    round: int
    now: float
    """The simulated clock as the round begins, seconds."""
    wanted: int
    """Clients a round."""
    select: Callable[[int, Ids], Ids]
    """(how many, whom not) → who is asked, ascending."""
    full_steps: Callable[[Ids], Ids]
    """Steps of a whole round of these clients."""
    flight: Flight
    is_partial: bool
    """Whether the algorithm takes what a slow client has come to."""

    def seconds(self, clients: Ids) -> NDArray[np.float64]:
        """What each takes for all its steps in this round."""
        return seconds_of(self.seed, self.round, clients, self.full_steps(clients))

    def usual_seconds(self, clients: Ids) -> NDArray[np.float64]:
        """What each is expected to take."""
        found: NDArray[np.float64] = (
            self.full_steps(clients) / speeds(self.seed, int(clients.max(initial=0)) + 1)[clients]
        )
        return found


@dataclass
class Plan:
    """One round: who starts, and whose updates count."""

    round: int
    clients: Ids
    """Those that start from the model as it is, and compute something; ascending."""
    steps: Ids
    """Of each."""
    later: Ids = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    """Of them, those whose updates arrive in a later round."""
    later_at: NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))
    """When, by the simulated clock."""
    arriving: Ids = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    """Clients whose updates of earlier rounds count in this one, ascending."""
    staleness_exponent: float = 0.0
    """An update that is τ rounds old counts (1 + τ)^-exponent."""
    too_slow: Ids = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    """Asked, and given up: nothing is computed for them."""
    ends: float | None = None
    """The simulated clock as the round ends; None: this pace has none."""
    seconds: dict[int, float] = field(default_factory=dict)
    """What each client takes, by the simulated clock."""
    quorum: int = 1
    """Updates without which there is no new model."""

    def is_now(self, clients: Ids) -> NDArray[np.bool_]:
        """Whether the update of each, begun in this round, counts in it."""
        return ~np.isin(clients, self.later)

    def arrives(self, clients: Ids) -> NDArray[np.float64]:
        at = dict(zip(self.later.tolist(), self.later_at.tolist(), strict=True))
        return np.array([at[client] for client in clients.tolist()])
