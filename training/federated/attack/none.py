"""No attack: all clients are honest."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from training.federated.attack_simulation import AttackerKnowledge

CHANGES_UPDATES = False


def forge(updates: Tensor, knowledge: AttackerKnowledge) -> Tensor:
    return updates
