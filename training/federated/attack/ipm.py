"""Inner-product manipulation: all attackers send −ε times the honest mean (Xie et al., 2020, arXiv 1903.03936)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

if TYPE_CHECKING:
    from torch import Tensor

    from training.federated.attack_simulation import AttackerKnowledge

COLLUDES = True


def forge(
    updates: Tensor,
    knowledge: AttackerKnowledge,
    *,
    epsilon: Annotated[
        float, "0.000001..1000000", "ε: small values hide among honest updates, large ones reverse the mean."
    ] = 0.5,
) -> Tensor:
    return (-epsilon * knowledge.honest.mean(dim=0)).expand_as(updates)
