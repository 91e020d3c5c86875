"""FedBuff: updates are buffered, and each full buffer makes a new model (Nguyen et al., 2021, arXiv 2106.06639)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated

if TYPE_CHECKING:
    from torch import Tensor

    from training.federated.client import Client
    from training.federated.server import Round

SENT = {"delta": "samples"}
PACES = ("asynchronous",)


def train(client: Client, **options: object) -> Mapping[str, Tensor]:
    return {"delta": client.descend() - client.model}


def aggregate(
    server: Round,
    *,
    learning_rate: Annotated[float, "0.001..100", "How far the server goes along the mean update."] = 1.0,
) -> Tensor:
    return server.model + learning_rate * server.mean["delta"]
