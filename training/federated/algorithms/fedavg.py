"""FedAvg: the mean of the clients' updates, weighted by their samples (McMahan et al., 2017, arXiv 1602.05629).

The server's part is the default of training.federation.parts.Algorithm.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from training.federated.client import Client

SENT = {"delta": "samples"}


def train(client: Client) -> Mapping[str, Tensor]:
    return {"delta": client.descend() - client.model}
