"""Your own rule: a file aggregation.py with combine(rows, weights).

The ranks read the file (training.federated.custom); this module stands in for it elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

OPEN = True


def combine(rows: Tensor, weights: Tensor, **options: object) -> tuple[Tensor, Sequence[int]]:
    raise NotImplementedError("aggregation.py is read on the ranks")
