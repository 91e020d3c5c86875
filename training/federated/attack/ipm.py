"""Inner-product manipulation: all attackers send −ε times the honest mean (Xie et al., 2020, arXiv 1903.03936)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

if TYPE_CHECKING:
    from torch import Tensor

    from training.federated.attack_simulation import Knowledge

COLLUDES = True


def forge(
    updates: Tensor,
    known: Knowledge,
    *,
    epsilon: Annotated[
        float, "0.000001..1000000", "ε: small ones hide among honest updates, large ones reverse the mean."
    ] = 0.5,
) -> Tensor:
    return (-epsilon * known.honest.mean(dim=0)).expand_as(updates)
