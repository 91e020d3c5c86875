"""Long tail: each client's classes decrease geometrically, from a different most frequent one."""

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
    imbalance: Annotated[
        float, "1..10000", "Samples of a client's most frequent class per sample of its rarest."
    ] = 100.0,
) -> NDArray[np.int64]:
    labels_of_samples = labels.by_split["train"]
    classes = np.unique(labels_of_samples)
    heads = rng.permutation(np.arange(clients) % len(classes))
    owners = np.empty(len(labels_of_samples), dtype=np.int64)
    for place, label in enumerate(classes):
        away = (place - heads) % len(classes)
        weights = imbalance ** -(away / max(1, len(classes) - 1))
        rows = rng.permutation(np.flatnonzero(labels_of_samples == label))
        owners[rows] = apportioned_owners(len(rows), weights / weights.sum())
    return owners
