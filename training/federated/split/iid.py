"""IID: all clients have the same mixture, and equally many samples."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from training.data import Labels


def divide(labels: Labels, clients: int, rng: np.random.RandomState) -> NDArray[np.int64]:
    samples = len(labels.by_split["train"])
    return rng.permutation(np.arange(samples) % clients)
