"""The faster a client is, the rather it is asked: rounds are short, and the slow ones' data count less."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import numpy as np
from numpy.typing import NDArray

from training.federation.speeds import speeds

if TYPE_CHECKING:
    from training.federation.client_selection import Asked


def select(
    asked: Asked,
    *,
    preference: Annotated[float, "0..20", "0: as likely as the slow ones; larger: the rather the fast ones."] = 2.0,
) -> NDArray[np.int64]:
    fast = speeds(asked.seed, len(asked.samples))[asked.eligible]
    return asked.weighted(fast**preference, asked.count)
