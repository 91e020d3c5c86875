"""Floats of 16 bits: 11 bits of precision, clipped to 65,504."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from training.federated.filter_context import FilterContext

STAGE = "width"
MAX_VALUE = 65504.0


def send(given: Tensor, context: FilterContext) -> tuple[Tensor, Mapping[str, Tensor]]:
    # NaN and infinity are sent as they are: the server has to see them.
    return given.clamp(-MAX_VALUE, MAX_VALUE).where(given.isfinite(), given).half(), {}


def receive(values: Tensor, extras: Mapping[str, Tensor], context: FilterContext) -> Tensor:
    return values.to(context.dtype)
