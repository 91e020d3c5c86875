"""How fast clients are, beside each other, where they are simulated: by the seed alone. No torch."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from training.runtime.seeds import derive_seed

SPEEDS = 5
"""Of what is derived from a run's seed, this number is for the clients' speeds."""


def speeds(seed: int, clients: int, *, spread: float = 0.5) -> NDArray[np.float64]:
    """(clients,): lognormal, the middle one's about 1. Who is faster than whom does not depend on `spread`, the
    deviation of the logarithm; more clients change nobody's."""
    draw = np.random.RandomState(derive_seed(seed, SPEEDS) % 2**32)
    return np.exp(spread * draw.standard_normal(clients))
