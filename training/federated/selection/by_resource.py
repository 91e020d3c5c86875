"""Faster clients are selected more often: rounds are short, and the data of slow ones count less."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import numpy as np
from numpy.typing import NDArray

from training.federation.speeds import speeds

if TYPE_CHECKING:
    from training.federation.client_selection import SelectionContext


def select(
    context: SelectionContext,
    *,
    preference: Annotated[float, "0..20", "0: all clients with equal probability; larger: fast ones more often."] = 2.0,
) -> NDArray[np.int64]:
    fast = speeds(context.seed, len(context.samples))[context.eligible]
    return context.weighted(fast**preference, context.count)
