"""A selection of your own: a file selection.py with select(round).

The file is read on the ranks (training.federated.custom); this module stands for it where nothing of it is known.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from training.federation.client_selection import Asked

OPEN = True


def select(asked: Asked, **options: object) -> NDArray[np.int64]:
    raise NotImplementedError("selection.py is read on the ranks")
