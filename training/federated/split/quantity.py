"""The same mixture for all clients, with sizes by a power law."""

from __future__ import annotations

from typing import Annotated

import numpy as np
from numpy.typing import NDArray

from training.data import Labels
from training.federation.apportionment import apportioned_owners


def divide(
    labels: Labels,
    clients: int,
    rng: np.random.RandomState,
    *,
    exponent: Annotated[float, "0..4", "Client k has k^-exponent as many samples as client 1; 0: all the same."] = 1.0,
) -> NDArray[np.int64]:
    weights = np.arange(1, clients + 1, dtype=np.float64) ** -exponent
    samples = len(labels.by_split["train"])
    return rng.permutation(apportioned_owners(samples, weights / weights.sum(), at_least=1))
