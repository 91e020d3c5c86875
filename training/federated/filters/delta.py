"""The difference to what the server has of the client's last one (EF21: Richtárik et al., 2021, arXiv 2106.05203).

For filters after it: what they lose of a difference is in the next one again. Both sides keep what the server has.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from training.federated.filter_chain import Passing

STAGE = "difference"
LAST = "last"


def begin(row: Tensor) -> Mapping[str, Tensor]:
    return {LAST: row.new_zeros(row.shape)}


def send(given: Tensor, passing: Passing) -> tuple[Tensor, Mapping[str, Tensor]]:
    return given - passing.kept[LAST], {}


def receive(values: Tensor, beside: Mapping[str, Tensor], passing: Passing) -> Tensor:
    return passing.kept[LAST] + values


def keep(given: Tensor, received: Tensor, passing: Passing) -> Mapping[str, Tensor]:
    return {LAST: received}
