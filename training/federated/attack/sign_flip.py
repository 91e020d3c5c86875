"""Sign flipping: attackers send the opposite of what they have learnt (Li et al., 2019, arXiv 1811.03761)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

if TYPE_CHECKING:
    from torch import Tensor

    from training.federated.attack_simulation import Knowledge


def forge(
    updates: Tensor,
    known: Knowledge,
    *,
    scale: Annotated[float, "0.000001..1000000", "How many times as long as their own update it is."] = 1.0,
) -> Tensor:
    return -scale * updates
