"""The difference to the client's last update as the server has it (EF21: Richtárik et al., 2021, arXiv 2106.05203).

For filters after it: what they lose of a difference is in the next one again. Both sides store the server's copy.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from training.federated.filter_context import FilterContext

STAGE = "difference"
LAST = "last"


def begin(row: Tensor) -> Mapping[str, Tensor]:
    return {LAST: row.new_zeros(row.shape)}


def send(given: Tensor, context: FilterContext) -> tuple[Tensor, Mapping[str, Tensor]]:
    return given - context.state[LAST], {}


def receive(values: Tensor, extras: Mapping[str, Tensor], context: FilterContext) -> Tensor:
    return context.state[LAST] + values


def keep(given: Tensor, received: Tensor, context: FilterContext) -> Mapping[str, Tensor]:
    return {LAST: received}
