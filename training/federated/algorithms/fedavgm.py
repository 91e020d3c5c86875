"""FedAvgM: the server takes the mean update with momentum (Hsu et al., 2019, arXiv 1909.06335)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated

if TYPE_CHECKING:
    from torch import Tensor

    from training.federated.client import Client
    from training.federated.server import ServerRound

SENT = {"delta": "samples"}


def initial_server_state(model: Tensor, **options: object) -> Mapping[str, Tensor]:
    return {"velocity": model.new_zeros(len(model))}


def train(client: Client, **options: object) -> Mapping[str, Tensor]:
    return {"delta": client.descend() - client.model}


def aggregate(
    server: ServerRound,
    *,
    learning_rate: Annotated[float, "0.000001..100", "The server's learning rate along its velocity."] = 1.0,
    momentum: Annotated[float, "0..0.9999", "Decay of the velocity in each round; 0: FedAvg."] = 0.9,
) -> Tensor:
    server.memory["velocity"] = momentum * server.memory["velocity"] + server.mean["delta"]
    return server.model + learning_rate * server.memory["velocity"]
