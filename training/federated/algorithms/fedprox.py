"""FedProx: a proximal term pulls clients towards the global model (Li et al., 2018, arXiv 1812.06127)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated

if TYPE_CHECKING:
    from torch import Tensor

    from training.federated.client import Client

SENT = {"delta": "samples"}
ACCEPTS_PARTIAL_WORK = True


def train(
    client: Client,
    *,
    mu: Annotated[float, "0..1000", "μ, the strength of the pull; 0: FedAvg."] = 0.01,
) -> Mapping[str, Tensor]:
    def proximal_direction(w: Tensor, gradient: Tensor) -> Tensor:
        return gradient + mu * (w - client.model)

    return {"delta": client.descend(proximal_direction) - client.model}
