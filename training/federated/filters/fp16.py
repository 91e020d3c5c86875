"""Numbers of 16 bits: 11 of precision, up to 65,504; larger ones are sent as that."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from training.federated.filter_chain import Passing

STAGE = "width"
LARGEST = 65504.0


def send(given: Tensor, passing: Passing) -> tuple[Tensor, Mapping[str, Tensor]]:
    # What is no number stays none: the server is to see it.
    return given.clamp(-LARGEST, LARGEST).where(given.isfinite(), given).half(), {}


def receive(values: Tensor, beside: Mapping[str, Tensor], passing: Passing) -> Tensor:
    return values.to(passing.dtype)
