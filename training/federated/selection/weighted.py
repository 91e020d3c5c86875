"""Clients with more samples are selected more often, without replacement."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from training.federation.client_selection import SelectionContext


def select(context: SelectionContext) -> NDArray[np.int64]:
    return context.weighted(context.samples[context.eligible].astype(np.float64), context.count)
