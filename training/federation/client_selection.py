"""Who takes part in a round: a function of the seed, the round and what a checkpoint remembers. No torch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from training.federation import parts, random_streams
from training.federation.config import FederationConfig
from training.federation.parts import Selection
from training.runtime.seeds import derive_seed


@dataclass(frozen=True)
class Asked:
    """What a selection may go by."""

    wanted: int
    """How many, if there are so many."""
    eligible: NDArray[np.int64]
    """Among which, ascending."""
    samples: NDArray[np.int64]
    """That each client has, all of them by number."""
    losses: NDArray[np.float64]
    """The mean loss of each when it last trained; NaN: it has not yet."""
    last_rounds: NDArray[np.int64]
    """(clients,): the round in which each was last asked to train; 0: in none yet."""
    round: int
    attempt: int
    """From 1; more: a round that was lost is tried again."""
    draw: np.random.RandomState
    seed: int
    """The run's: for what stays as it is from round to round."""

    @property
    def count(self) -> int:
        """How many there can be."""
        return min(self.wanted, len(self.eligible))

    def weighted(self, weights: NDArray[np.float64], many: int) -> NDArray[np.int64]:
        """So many of the eligible, ascending, nobody twice: one after the other, each by its weight among those left.

        Whoever's clock of that rate rings first (Efraimidis and Spirakis, 2006, doi 10.1016/j.ipl.2005.11.003).
        """
        rings = self.draw.standard_exponential(len(self.eligible)) / weights
        return np.sort(self.eligible[np.argsort(rings, kind="stable")[:many]])


def select(
    config: FederationConfig,
    count: int,
    *,
    eligible: NDArray[np.int64],
    samples: NDArray[np.int64],
    losses: NDArray[np.float64],
    round_: int,
    attempt: int = 1,
    last_rounds: NDArray[np.int64] | None = None,
    selection: Selection | None = None,
) -> NDArray[np.int64]:
    """The numbers of those that are asked in this round, `count` of the `eligible`, ascending.

    `selection`: somebody's own; None: the one that the run names.
    """
    if count <= 0 or not len(eligible):
        return eligible[:0]
    if count >= len(eligible) and config.selection == "uniform":
        return eligible
    draw = np.random.RandomState(derive_seed(config.seed, random_streams.SELECTION, round_, attempt) % 2**32)
    last = np.zeros(len(samples), dtype=np.int64) if last_rounds is None else last_rounds
    asked = Asked(count, eligible, samples, losses, last, round_, attempt, draw, config.seed)
    selection = selection or parts.selection(config.selection)
    return selection.select(asked, **config.options_of(config.selection))
