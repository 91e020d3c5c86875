"""Your own selection: a file selection.py with select(round).

The ranks read the file (training.federated.custom); this module stands in for it elsewhere.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from training.federation.client_selection import SelectionContext

OPEN = True


def select(context: SelectionContext, **options: object) -> NDArray[np.int64]:
    raise NotImplementedError("selection.py is read on the ranks")
