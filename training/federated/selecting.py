"""Who takes part in a round: a function of the seed, the round and what a checkpoint remembers. No torch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from training import contracts
from training.federation.config import FederationConfig
from training.runtime.seeds import derive_seed

SELECTED = 4
"""Of what is derived from a run's seed, this number is for the selection."""


@dataclass(frozen=True)
class Asked:
    """What a selection may go by."""

    count: int
    """How many are wanted."""
    eligible: NDArray[np.int64]
    """Among which, ascending."""
    samples: NDArray[np.int64]
    """That each client has, all of them by number."""
    losses: NDArray[np.float64]
    """The mean loss of each when it last trained; NaN: it has not yet."""
    round: int
    attempt: int
    """From 1; more: a round that was lost is tried again."""
    draw: np.random.RandomState


def select(
    config: FederationConfig,
    count: int,
    *,
    eligible: NDArray[np.int64],
    samples: NDArray[np.int64],
    losses: NDArray[np.float64],
    round_: int,
    attempt: int = 1,
) -> NDArray[np.int64]:
    """The numbers of those that are asked in this round, `count` of the `eligible`, ascending."""
    count = max(0, min(count, len(eligible)))
    if count == 0:
        return eligible[:0]
    if count == len(eligible) and config.selection == "uniform":
        return eligible
    draw = np.random.RandomState(derive_seed(config.seed, SELECTED, round_, attempt) % 2**32)
    asked = Asked(count, eligible, samples, losses, round_, attempt, draw)
    return contracts.selection(config.selection).select(asked, **config.options_of(config.selection))
