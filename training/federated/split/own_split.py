"""Your own split: a file split.py with divide(labels, clients, rng), and view() if clients see samples differently.

The ranks read the file (training.federated.custom); this module stands in for it elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from training.config.shape import Misfit
from training.federation import custom

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from training.data import Labels
    from training.federation.config import FederationConfig

OPEN = True


def divide(labels: Labels, clients: int, rng: np.random.RandomState, **options: object) -> NDArray[np.int64]:
    raise NotImplementedError("split.py is read on the ranks")


def check(config: FederationConfig) -> Iterator[Misfit]:
    if custom.CLIENT in config.custom:
        text = f'is "{config.split}", but data(client) of client.py already says what each client has.'
        yield Misfit("split", f'{text} Write "column", or a recipe of Vigil\'s, such as "tabular".')
