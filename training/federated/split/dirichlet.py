"""Each class is shared out by a Dirichlet draw of its own (Hsu et al., 2019, arXiv 1909.06335)."""

from __future__ import annotations

from typing import Annotated

import numpy as np
from numpy.typing import NDArray

from training.data import Labels
from training.federation.shares import shared_out


def divide(
    labels: Labels,
    clients: int,
    draw: np.random.RandomState,
    *,
    alpha: Annotated[float, "0.001..1000", "Small: a client has few of the classes; large: all have the same."] = 0.3,
) -> NDArray[np.int64]:
    of = labels.of["train"]
    owners = np.empty(len(of), dtype=np.int64)
    for label in np.unique(of):
        rows = draw.permutation(np.flatnonzero(of == label))
        owners[rows] = shared_out(len(rows), draw.dirichlet(np.full(clients, alpha)))
    return owners
