"""A Dirichlet draw for each class, repeated until all clients have samples (Yurochkin et al., 2019, arXiv 1905.12022).

Clients differ in their number of samples, too; dirichlet_equal gives all of them equally many.

1. All classes are drawn, again and again while a client has fewer than `min_samples`, at most TRIES times. 2. Clients
that are short even then get what they lack from the client with most samples, of its most frequent class. With 100
clients and alpha = 0.05 no draw of ten classes reaches all clients.
"""

from __future__ import annotations

import heapq
from typing import Annotated

import numpy as np
from numpy.typing import NDArray

from training.data import Labels
from training.federation.apportionment import apportion

TRIES = 100
"""Draws at most: where one in nine succeeds (20 clients, alpha = 0.1, digits) all but one of 100,000 seeds succeed."""
DRAWN_NUMBERS = 2_000_000
"""Numbers drawn at most in all draws together: 10,000 clients with ten classes are drawn 20 times, in 0.2 s."""
FORMER = (("min_samples", 1),)
"""The meaning of the option in runs that are older than it: they took the first draw."""


def divide(
    labels: Labels,
    clients: int,
    rng: np.random.RandomState,
    *,
    alpha: Annotated[float, "0.001..1000", "Small: clients have few of the classes; large: all have the same."] = 0.3,
    min_samples: Annotated[
        int, "1..1000000", "Minimum samples per client; half of an equal share, if that is less."
    ] = 10,
) -> NDArray[np.int64]:
    labels_of_samples = labels.by_split["train"]
    least = max(1, min(min_samples, len(labels_of_samples) // (2 * clients)))
    rows, counts = [], []
    for label in np.unique(labels_of_samples):  # rows first, so that the first draw is that of older versions
        rows.append(rng.permutation(np.flatnonzero(labels_of_samples == label)))
        counts.append(apportion(len(rows[-1]), _parts(clients, alpha, rng)))
    found = np.stack(counts)
    for _ in range(min(TRIES, DRAWN_NUMBERS // found.size) - 1):
        if found.sum(axis=0).min() >= least:
            break
        found = np.stack([apportion(len(some), _parts(clients, alpha, rng)) for some in rows])
    if len(labels_of_samples) >= clients:
        _fill_up(found, least)
    owners = np.empty(len(labels_of_samples), dtype=np.int64)
    for some, count in zip(rows, found, strict=True):
        owners[some] = np.repeat(np.arange(clients), count)
    return owners


def _parts(clients: int, alpha: float, rng: np.random.RandomState) -> NDArray[np.float64]:
    """Return shares (clients,) that sum to 1.

    With a tiny alpha all may underflow to 0: then one client has everything.
    """
    with np.errstate(invalid="ignore"):
        parts: NDArray[np.float64] = rng.dirichlet(np.full(clients, alpha))
    if not np.isfinite(parts).all():
        parts = np.zeros(clients)
        parts[rng.randint(clients)] = 1
    return parts


def _fill_up(counts: NDArray[np.int64], least: int) -> None:
    """Give clients that have fewer than `least` what they lack. `counts`: (classes, clients), changed in place."""
    sizes = counts.sum(axis=0)
    richest = [(-int(size), client) for client, size in enumerate(sizes) if size > least]
    heapq.heapify(richest)
    for client in np.flatnonzero(sizes < least).tolist():
        lacks = least - int(sizes[client])
        while lacks:
            size, donor = heapq.heappop(richest)
            label = int(counts[:, donor].argmax())
            given = min(lacks, int(counts[label, donor]), -size - least)
            counts[label, [donor, client]] += [-given, given]
            lacks -= given
            if -size - given > least:
                heapq.heappush(richest, (size + given, donor))
