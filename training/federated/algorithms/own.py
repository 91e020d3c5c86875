"""Your own algorithm: a file algorithm.py with aggregate(server), and train(client) unless clients train as in FedAvg.

It may define the fields of training.federation.parts.Algorithm. This module has their defaults.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from training.federated.client import Client
    from training.federated.server import ServerRound

OPEN = True
SENT = {"delta": "samples"}


def train(client: Client, **options: object) -> Mapping[str, Tensor]:
    return {"delta": client.descend() - client.model}


def aggregate(server: ServerRound) -> Tensor:
    return server.model + server.mean["delta"]
