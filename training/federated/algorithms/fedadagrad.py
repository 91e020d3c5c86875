"""FedAdagrad: the server takes Adagrad's steps along the mean update (Reddi et al., 2020, arXiv 2003.00295)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated

from training.federated.algorithms._adaptive import adaptive_step, initial_moments

if TYPE_CHECKING:
    from torch import Tensor

    from training.federated.client import Client
    from training.federated.server import ServerRound

SENT = {"delta": "samples"}
initial_server_state = initial_moments


def train(client: Client, **options: object) -> Mapping[str, Tensor]:
    return {"delta": client.descend() - client.model}


def aggregate(
    server: ServerRound,
    *,
    learning_rate: Annotated[float, "0.000001..100", "Learning rate of the server's steps."] = 0.03,
    beta1: Annotated[float, "0..0.999999", "Decay of the first moment in each round."] = 0.0,
    tau: Annotated[
        float, "0.00000001..1", "Added to the root of the second moment: the larger, the less adaptive."
    ] = 0.001,
) -> Tensor:
    def second(before: Tensor, square: Tensor) -> Tensor:
        return before + square

    return adaptive_step(server, second, learning_rate=learning_rate, beta1=beta1, tau=tau)
