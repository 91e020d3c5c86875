"""Simulate how fast each virtual client is, by the seed. No torch."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from training.federation import random_streams
from training.runtime.seeds import derive_seed

SECONDS_PER_STEP = 0.1
"""Seconds of a step of the median client."""
SPREAD = 0.8
"""Standard deviation of the logarithm of speeds: the slowest of a hundred takes about six times as long as the
median."""
JITTER_SPREAD = 0.1
"""Standard deviation of the logarithm from round to round."""


def speeds(seed: int, clients: int) -> NDArray[np.float64]:
    """Return the steps per second of clients 0 to `clients` - 1, which are log-normal."""
    rng = np.random.RandomState(derive_seed(seed, random_streams.SPEED) % 2**32)
    return np.exp(SPREAD * rng.standard_normal(clients)) / SECONDS_PER_STEP


def seconds_of(seed: int, round_: int, clients: NDArray[np.int64], steps: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return how many seconds each of these clients takes for its steps in this round."""
    most = int(clients.max(initial=0)) + 1
    rng = np.random.RandomState(derive_seed(seed, random_streams.JITTER, round_) % 2**32)
    varies = np.exp(JITTER_SPREAD * rng.standard_normal(most))[clients]
    found: NDArray[np.float64] = steps / speeds(seed, most)[clients] * varies
    return found
