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
        owners[rows] = shared_out(len(rows), _parts(clients, alpha, draw))
    return owners


def _parts(clients: int, alpha: float, draw: np.random.RandomState) -> NDArray[np.float64]:
    """(clients,): whose sum is 1. Of a tiny alpha all numbers may be 0 to a float: then one client has everything."""
    with np.errstate(invalid="ignore"):
        parts: NDArray[np.float64] = draw.dirichlet(np.full(clients, alpha))
    if not np.isfinite(parts).all():
        parts = np.zeros(clients)
        parts[draw.randint(clients)] = 1
    return parts
