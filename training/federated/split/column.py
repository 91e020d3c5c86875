"""As the data say: an author, a hospital, a package each."""

from __future__ import annotations

import heapq
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from training.config.shape import Misfit
from training.data import Labels
from training.federation.config import FederationConfig

NATURAL = True


def divide(labels: Labels, clients: int, draw: np.random.RandomState) -> NDArray[np.int64]:
    """Of as many owners as clients each is one, in their order. Else the largest are clients of their own; what the
    others have goes to them in turn, the smallest first."""
    assert labels.owners is not None
    owners = labels.owners["train"]
    names, places, counts = np.unique(owners, return_inverse=True, return_counts=True)
    if len(names) == clients:
        return places.astype(np.int64)
    order = names[np.argsort(-counts, kind="stable")]
    held = [(0, client) for client in range(clients)]  # a heap: who has least, and of those the first
    client_of = {}
    for name, count in zip(order.tolist(), np.sort(counts)[::-1].tolist(), strict=True):
        has, client_of[name] = held[0]
        heapq.heapreplace(held, (has + count, client_of[name]))
    return np.array([client_of[name] for name in owners.tolist()], dtype=np.int64)


def check(config: FederationConfig) -> Iterator[Misfit]:
    from training import contracts

    recipe = contracts.recipe(config.recipe)
    if not recipe.has_owners(**config.recipe_options()):
        yield Misfit("split", f'is "column", but nobody owns samples of {config.recipe} by nature. Write "dirichlet".')
