"""Each by a draw of its own, so many on average: what the accounts of differential privacy suppose."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from training.federation.client_selection import Asked


def select(asked: Asked) -> NDArray[np.int64]:
    """A round of nobody is drawn again: it would teach nothing. With per_round = 10 it is one in 22,000."""
    chance = asked.wanted / len(asked.samples)
    while len(asked.eligible):
        found = asked.eligible[asked.draw.random_sample(len(asked.eligible)) < chance]
        if len(found):
            return found
    return asked.eligible
