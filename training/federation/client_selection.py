"""Select the clients of a round, as a function of the seed, the round and the state in checkpoints. No torch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from training.federation import parts, random_streams
from training.federation.config import FederationConfig
from training.federation.parts import Selection
from training.runtime.seeds import derive_seed


@dataclass(frozen=True)
class SelectionContext:
    """The input of a selection: `round` of select(round) in a user's selection.py."""

    wanted: int
    """Number of clients to select, if so many are eligible."""
    eligible: NDArray[np.int64]
    """Ids of the clients that may be selected, ascending."""
    samples: NDArray[np.int64]
    """(clients,): training samples of each client."""
    losses: NDArray[np.float64]
    """(clients,): the mean loss of each client when it last trained; NaN: never."""
    last_rounds: NDArray[np.int64]
    """(clients,): the round in which each client was last selected; 0: never."""
    round: int
    attempt: int
    """The attempt at this round, from 1: a lost round is tried again."""
    rng: np.random.RandomState
    """Seeded for this round and attempt."""
    seed: int
    """The run's seed, for what does not change from round to round."""

    @property
    def draw(self) -> np.random.RandomState:
        """Return `rng`. Deprecated."""
        return self.rng

    @property
    def count(self) -> int:
        """Return how many clients can be selected: `wanted`, or all eligible ones."""
        return min(self.wanted, len(self.eligible))

    def weighted(self, weights: NDArray[np.float64], many: int) -> NDArray[np.int64]:
        """Return `many` of the eligible clients, ascending, drawn without replacement with probability by weight.

        Each gets an exponential clock of that rate, and the first ones to ring are taken (Efraimidis and Spirakis,
        2006, doi 10.1016/j.ipl.2005.11.003).
        """
        rings = self.rng.standard_exponential(len(self.eligible)) / weights
        return np.sort(self.eligible[np.argsort(rings, kind="stable")[:many]])


@dataclass(frozen=True, kw_only=True)
class SelectionState:
    """The state of a federation that the selection of a round may depend on; see SelectionContext for the fields."""

    eligible: NDArray[np.int64]
    samples: NDArray[np.int64]
    losses: NDArray[np.float64]
    last_rounds: NDArray[np.int64] | None = None
    """None: no client has been selected yet."""
    round: int
    attempt: int = 1


def select(
    config: FederationConfig, count: int, state: SelectionState, selection: Selection | None = None
) -> NDArray[np.int64]:
    """Return the clients of this round, `count` of the eligible ones, ascending.

    `selection`: that of a user's file; None: the one that the run names.
    """
    eligible, last = state.eligible, state.last_rounds
    if count <= 0 or not len(eligible):
        return eligible[:0]
    if count >= len(eligible) and config.selection == "uniform":
        return eligible
    seed = derive_seed(config.seed, random_streams.SELECTION, state.round, state.attempt)
    context = SelectionContext(
        wanted=count,
        eligible=eligible,
        samples=state.samples,
        losses=state.losses,
        last_rounds=np.zeros(len(state.samples), dtype=np.int64) if last is None else last,
        round=state.round,
        attempt=state.attempt,
        rng=np.random.RandomState(seed % 2**32),
        seed=config.seed,
    )
    selection = selection or parts.selection(config.selection)
    return selection.select(context, **config.options_of(config.selection))
