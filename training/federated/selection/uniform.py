"""Uniform: clients are selected with equal probability."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from training.federation.client_selection import SelectionContext


def select(context: SelectionContext) -> NDArray[np.int64]:
    return np.sort(context.rng.permutation(context.eligible)[: context.count])
