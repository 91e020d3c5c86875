"""The same mixture for all clients, with features scaled and shifted for each (see Li et al., 2021, arXiv 2102.07623).

Like scanners or sites that measure differently: labels mean the same, features do not look the same.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import numpy as np
from numpy.typing import NDArray

from training.data import Labels
from training.federated.schedule import uniform
from training.federated.split import iid
from training.federation import random_streams
from training.runtime.seeds import derive_seed

if TYPE_CHECKING:
    from training.data import Batch


def view(
    batch: Batch,
    owners: NDArray[np.int64],
    seed: int,
    *,
    strength: Annotated[float, "0..10", "Scales from 1 / (1 + strength) to 1 + strength, shifts to ± strength."] = 0.5,
) -> Batch:
    """Scale and shift each feature, or channel of an image, by random numbers of the client.

    Samples without a client (-1) are not changed. Only the first part of the batch, the model's input, is changed.
    """
    import torch

    first, *rest = batch
    if not first.is_floating_point() or first.ndim < 2:
        raise ValueError('split = "shift" changes features, and these samples have none. Write split = "iid".')
    scale, move = drawn(owners, first.shape[1], seed, strength)
    shape = (len(first), -1, *[1] * (first.ndim - 2))
    return first * torch.from_numpy(scale).to(first).view(shape) + torch.from_numpy(move).to(first).view(shape), *rest


def divide(labels: Labels, clients: int, rng: np.random.RandomState, **options: object) -> NDArray[np.int64]:
    return iid.divide(labels, clients, rng)


def drawn(
    owners: NDArray[np.int64], features: int, seed: int, strength: float
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return scales and shifts, (samples, features) each."""
    clients, place = np.unique(owners, return_inverse=True)
    numbers = (
        2 * uniform([derive_seed(seed, random_streams.VIEW, client) for client in clients.tolist()], 2 * features) - 1
    )
    numbers[clients < 0] = 0
    scale, move = (1 + strength) ** numbers[:, :features], strength * numbers[:, features:]
    return scale[place], move[place]
