"""Scaling: attackers send their update many times over, to replace the model (Bagdasaryan et al., 2018, 1807.00459)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

if TYPE_CHECKING:
    from torch import Tensor

    from training.federated.attack_simulation import Knowledge


def forge(
    updates: Tensor,
    known: Knowledge,
    *,
    factor: Annotated[
        float, "0.000001..1000000", "How many times; the paper's replaces the model: all clients."
    ] = 10.0,
) -> Tensor:
    return factor * updates
