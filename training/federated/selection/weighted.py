"""The more samples a client has, the rather it is asked; nobody twice."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from training.federation.client_selection import Asked


def select(asked: Asked) -> NDArray[np.int64]:
    return asked.weighted(asked.samples[asked.eligible].astype(np.float64), asked.count)
