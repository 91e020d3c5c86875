"""So many, each as likely as any other."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from training.federation.client_selection import Asked


def select(asked: Asked) -> NDArray[np.int64]:
    return np.sort(asked.draw.permutation(asked.eligible)[: asked.count])
