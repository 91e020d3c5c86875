"""FedProx: clients are held near the model that they were sent (Li et al., 2018, arXiv 1812.06127)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated

if TYPE_CHECKING:
    from torch import Tensor

    from training.federated.client import Client
    from training.federated.server import Round

SENT = {"delta": "samples"}
PARTIAL = True


def train(
    client: Client,
    *,
    mu: Annotated[float, "0..1000", "How strongly; 0: not at all, as in FedAvg."] = 0.01,
) -> Mapping[str, Tensor]:
    def held(w: Tensor, gradient: Tensor) -> Tensor:
        return gradient + mu * (w - client.model)

    return {"delta": client.descend(held) - client.model}


def aggregate(server: Round, **options: object) -> Tensor:
    return server.model + server.mean["delta"]
