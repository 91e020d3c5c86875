"""How fast each virtual client is: by seed, the same wherever it is asked. No torch."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from training.federation import random_streams
from training.runtime.seeds import derive_seed

SECONDS_A_STEP = 0.1
"""Of the client in the middle."""
SPREAD = 0.8
"""Of the logarithm of speeds: the slowest of a hundred takes some six times as long as the one in the middle."""
VARIES = 0.1
"""Of the logarithm, from round to round."""


def speeds(seed: int, clients: int) -> NDArray[np.float64]:
    """Steps a second of clients 0 to `clients` - 1, log-normal."""
    draw = np.random.RandomState(derive_seed(seed, random_streams.SPEED) % 2**32)
    return np.exp(SPREAD * draw.standard_normal(clients)) / SECONDS_A_STEP


def seconds_of(seed: int, round_: int, clients: NDArray[np.int64], steps: NDArray[np.int64]) -> NDArray[np.float64]:
    """What each of these clients takes for so many steps in this round."""
    most = int(clients.max(initial=0)) + 1
    draw = np.random.RandomState(derive_seed(seed, random_streams.JITTER, round_) % 2**32)
    varies = np.exp(VARIES * draw.standard_normal(most))[clients]
    found: NDArray[np.float64] = steps / speeds(seed, most)[clients] * varies
    return found
