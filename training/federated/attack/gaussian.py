"""Gaussian: attackers send random numbers (Blanchard et al., 2017, arXiv 1703.02757)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

if TYPE_CHECKING:
    from torch import Tensor

    from training.federated.attack_simulation import AttackerKnowledge


def forge(
    updates: Tensor,
    knowledge: AttackerKnowledge,
    *,
    deviation: Annotated[float, "0.000001..1000000", "Standard deviation of each coordinate; the paper has 200."] = 1.0,
) -> Tensor:
    import torch

    attackers, size = updates.shape
    draws = [torch.randn(size, generator=knowledge.generator(place)) for place in range(attackers)]
    return deviation * torch.stack(draws).to(updates)
