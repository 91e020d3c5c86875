"""Sign flipping: attackers send the negative of their update (Li et al., 2019, arXiv 1811.03761)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

if TYPE_CHECKING:
    from torch import Tensor

    from training.federated.attack_simulation import AttackerKnowledge


def forge(
    updates: Tensor,
    knowledge: AttackerKnowledge,
    *,
    scale: Annotated[float, "0.000001..1000000", "Length relative to their own update."] = 1.0,
) -> Tensor:
    return -scale * updates
