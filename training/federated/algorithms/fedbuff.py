"""FedBuff: each full buffer makes a new model; by samples, in the paper equally (Nguyen, 2021, arXiv 2106.06639).

**It differs from the paper**, which weights all updates of a buffer equally: `weights = "equal"` does that. By samples
is the default, so that a buffer of all clients is FedAvg.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Literal

if TYPE_CHECKING:
    from torch import Tensor

    from training.federated.client import Client
    from training.federated.server import ServerRound

SENT = {"delta": "samples"}
PACES = ("asynchronous",)
CHOOSES_WEIGHTS = True


def train(client: Client, **options: object) -> Mapping[str, Tensor]:
    return {"delta": client.descend() - client.model}


def aggregate(
    server: ServerRound,
    *,
    learning_rate: Annotated[float, "0.001..100", "The server's learning rate along the mean update."] = 1.0,
    weights: Annotated[Literal["samples", "equal"], "Weights of the updates; equal is the paper's."] = "samples",
    **options: object,
) -> Tensor:
    return server.model + learning_rate * server.mean["delta"]
