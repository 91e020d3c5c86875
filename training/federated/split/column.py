"""As the data say: an author, a hospital, a package each."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from training.config.shape import Misfit
from training.data import Labels
from training.federation.config import FederationConfig

NATURAL = True


def divide(labels: Labels, clients: int, draw: np.random.RandomState) -> NDArray[np.int64]:
    """The largest owners are clients of their own; what the others have goes to them in turn, the smallest first."""
    assert labels.owners is not None
    owners = labels.owners["train"]
    names, counts = np.unique(owners, return_counts=True)
    order = names[np.argsort(-counts, kind="stable")]
    held = np.zeros(clients, dtype=np.int64)
    client_of = {}
    for name, count in zip(order.tolist(), np.sort(counts)[::-1].tolist(), strict=True):
        least = int(held.argmin())
        client_of[name] = least
        held[least] += count
    return np.array([client_of[name] for name in owners.tolist()], dtype=np.int64)


def check(config: FederationConfig) -> Iterator[Misfit]:
    from training import contracts

    recipe = contracts.recipe(config.recipe)
    if not recipe.has_owners(**config.recipe_options()):
        yield Misfit("split", f'is "column", but nobody owns samples of {config.recipe} by nature. Write "dirichlet".')
