"""The same mixture for everybody, in another light: features scaled and moved (see Li et al., 2021, arXiv 2102.07623).

Like scanners or sites that measure differently: what is to be told is the same, what it looks like is not.
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
    strength: Annotated[float, "0..10", "Features times 1 / (1 + strength) to 1 + strength, plus or minus it."] = 0.5,
) -> Batch:
    """Each feature, or channel of an image, is scaled and moved by a draw of the client's own.

    Nobody's samples (-1) stay as they are. Only the first part, what goes into the model, is changed.
    """
    import torch

    first, *rest = batch
    if not first.is_floating_point() or first.ndim < 2:
        raise ValueError('split = "shift" changes features, and these samples have none. Write split = "iid".')
    scale, move = drawn(owners, first.shape[1], seed, strength)
    shape = (len(first), -1, *[1] * (first.ndim - 2))
    return first * torch.from_numpy(scale).to(first).view(shape) + torch.from_numpy(move).to(first).view(shape), *rest


def divide(labels: Labels, clients: int, draw: np.random.RandomState, **options: object) -> NDArray[np.int64]:
    return iid.divide(labels, clients, draw)


def drawn(
    owners: NDArray[np.int64], features: int, seed: int, strength: float
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Scales and moves, (samples, features) each."""
    clients, place = np.unique(owners, return_inverse=True)
    numbers = (
        2 * uniform([derive_seed(seed, random_streams.VIEW, client) for client in clients.tolist()], 2 * features) - 1
    )
    numbers[clients < 0] = 0
    scale, move = (1 + strength) ** numbers[:, :features], strength * numbers[:, features:]
    return scale[place], move[place]
