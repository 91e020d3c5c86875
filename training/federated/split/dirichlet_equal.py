"""Give every client equally many samples, of classes from its own Dirichlet draw (Hsu et al., 2019, arXiv 1909.06335).

As in the paper, `alpha` is the sum over all classes, divided by how common they are: 1 with ten classes is as skewed as
0.1 in `dirichlet`. Once a class is used up, clients draw from the others.
"""

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
    alpha: Annotated[float, "0.001..1000", "Small: clients have few of the classes; large: all have the same."] = 1.0,
) -> NDArray[np.int64]:
    labels_of_samples = labels.by_split["train"]
    classes, left = np.unique(labels_of_samples, return_counts=True)
    mixtures = _mixtures(left / len(labels_of_samples), clients, alpha, rng)
    counts = np.zeros((len(classes), clients), dtype=np.int64)
    sizes = np.full(clients, len(labels_of_samples) // clients) + (
        np.arange(clients) < len(labels_of_samples) % clients
    )
    for client in rng.permutation(clients).tolist():  # the last client gets the remainder
        counts[:, client] = _draw_counts(int(sizes[client]), mixtures[client], left, rng)
        left -= counts[:, client]
    owners = np.empty(len(labels_of_samples), dtype=np.int64)
    for label, count in zip(classes, counts, strict=True):
        owners[rng.permutation(np.flatnonzero(labels_of_samples == label))] = np.repeat(np.arange(clients), count)
    return owners


def _mixtures(
    common: NDArray[np.float64], clients: int, alpha: float, rng: np.random.RandomState
) -> NDArray[np.float64]:
    """Return the mixture of each client (clients, classes), whose rows sum to 1."""
    with np.errstate(invalid="ignore"):
        found: NDArray[np.float64] = rng.dirichlet(alpha * common, size=clients)
    lost = ~np.isfinite(found).all(axis=1)  # all 0 to a float, of a tiny alpha: then it has one class
    found[lost] = np.eye(len(common))[rng.choice(len(common), size=int(lost.sum()), p=common)]
    return found


def _draw_counts(
    many: int, mixture: NDArray[np.float64], left: NDArray[np.int64], rng: np.random.RandomState
) -> NDArray[np.int64]:
    """Draw samples by the mixture, of no class more than remain. Return their counts (classes,)."""
    taken = np.zeros_like(left)
    while missing := many - int(taken.sum()):
        rest = left - taken
        weights = np.where(rest > 0, mixture, 0.0)
        if not weights.sum() > 0:  # it has none of the classes that are left
            weights = rest.astype(np.float64)
        taken += np.minimum(rng.multinomial(missing, weights / weights.sum()), rest)
    return taken
