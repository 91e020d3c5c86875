"""Samples sorted by class and cut into shards, a few for each client (McMahan et al., 2017, arXiv 1602.05629)."""

from __future__ import annotations

from typing import Annotated

import numpy as np
from numpy.typing import NDArray

from training.data import Labels


def divide(
    labels: Labels,
    clients: int,
    rng: np.random.RandomState,
    *,
    shards_each: Annotated[int, "1..1000", "Shards per client; about its number of classes."] = 2,
) -> NDArray[np.int64]:
    """Return the client of each sample.

    With few samples there are fewer shards, so that no client has only empty ones.
    """
    labels_of_samples = labels.by_split["train"]
    by_class = np.argsort(labels_of_samples, kind="stable")
    shards = clients * max(1, min(shards_each, len(labels_of_samples) // clients))
    shard_owners = rng.permutation(np.arange(shards) % clients)
    owners = np.empty(len(labels_of_samples), dtype=np.int64)
    for owner, rows in zip(shard_owners, np.array_split(by_class, shards), strict=True):
        owners[rows] = owner
    return owners
