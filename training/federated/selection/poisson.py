"""Poisson sampling: clients are selected independently of each other, as differential privacy assumes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from training.federation.client_selection import SelectionContext


def select(context: SelectionContext) -> NDArray[np.int64]:
    """Select each client with probability wanted / clients.

    An empty round, one in 22,000 for 10 of many, is redrawn.
    """
    chance = context.wanted / len(context.samples)
    while len(context.eligible):
        found = context.eligible[context.rng.random_sample(len(context.eligible)) < chance]
        if len(found):
            return found
    return context.eligible
