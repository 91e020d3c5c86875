"""Natural: samples go by the owners that the data name, such as authors, hospitals or packages."""

from __future__ import annotations

import heapq
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from training.config.shape import Misfit
from training.data import Labels
from training.federation.config import FederationConfig

NATURAL = True


def divide(labels: Labels, clients: int, rng: np.random.RandomState) -> NDArray[np.int64]:
    """Make each owner a client if there are as many owners as clients.

    Otherwise assign owners, the largest first, to the client with the fewest samples so far.
    """
    assert labels.owners is not None
    owners = labels.owners["train"]
    names, places, counts = np.unique(owners, return_inverse=True, return_counts=True)
    if len(names) == clients:
        return places.astype(np.int64)
    order = names[np.argsort(-counts, kind="stable")]
    loads = [(0, client) for client in range(clients)]  # a heap: fewest samples first, then the lowest number
    client_of = {}
    for name, count in zip(order.tolist(), np.sort(counts)[::-1].tolist(), strict=True):
        load, client_of[name] = loads[0]
        heapq.heapreplace(loads, (load + count, client_of[name]))
    return np.array([client_of[name] for name in owners.tolist()], dtype=np.int64)


def check(config: FederationConfig) -> Iterator[Misfit]:
    from training import contracts

    recipe = contracts.recipe(config.recipe)
    if not recipe.has_owners(**config.recipe_options()):
        yield Misfit("split", f'is "column", but samples of {config.recipe} have no owners. Write "dirichlet".')
