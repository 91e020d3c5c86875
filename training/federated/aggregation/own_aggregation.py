"""A rule of your own: a file aggregation.py with combine(rows, weights).

The file is read on the ranks (training.federated.custom); this module stands for it where nothing of it is known.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

OPEN = True


def combine(rows: Tensor, weights: Tensor, **options: object) -> tuple[Tensor, Sequence[int]]:
    raise NotImplementedError("aggregation.py is read on the ranks")
