"""Scaling: attackers multiply their update to replace the model (Bagdasaryan et al., 2018, arXiv 1807.00459)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

if TYPE_CHECKING:
    from torch import Tensor

    from training.federated.attack_simulation import AttackerKnowledge


def forge(
    updates: Tensor,
    knowledge: AttackerKnowledge,
    *,
    factor: Annotated[
        float,
        "0.000001..1000000",
        "Factor of the update; the number of clients replaces the model, as in the paper.",
    ] = 10.0,
) -> Tensor:
    return factor * updates
