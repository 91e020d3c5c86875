"""Your own algorithm: algorithm.py with aggregate(server) or run_round(controller), and optionally train(client).

It may define the fields of training.federation.parts.Algorithm. What it leaves out is FedAvg's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from training.federated.client import Client

OPEN = True
SENT = {"delta": "samples"}


def train(client: Client, **options: object) -> Mapping[str, Tensor]:
    return {"delta": client.descend() - client.model}
