"""FedNova: updates are normalised by their number of steps (Wang et al., 2020, arXiv 2007.07481).

An update is divided by its steps, and the mean is multiplied by their mean number. With momentum the paper's ‖a‖₁ takes
the place of the number of steps: the sum of the weights with which the gradients enter the update.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from training.federated.client import Client
    from training.federated.server import ServerRound

SENT = {"delta": "samples", "steps": "samples"}
ACCEPTS_PARTIAL_WORK = True


def train(client: Client) -> Mapping[str, Tensor]:
    delta = client.descend() - client.model
    steps = client.sgd.normalizer(client.steps)
    return {"delta": delta / steps, "steps": delta.new_full((), steps)}


def aggregate(server: ServerRound) -> Tensor:
    return server.model + server.mean["steps"] * server.mean["delta"]
