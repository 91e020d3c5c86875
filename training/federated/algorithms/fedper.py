"""FedPer: the head stays with each client, the rest is shared (Arivazhagan et al., 2019, arXiv 1912.00818)."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor, nn

    from training.federated.client import Client

NEEDS_PERSONAL_TENSORS = True
SENT = {"delta": "samples"}
NEEDS_HEAD = True


def personal(model: nn.Module, *, head: str, **options: object) -> Collection[str]:
    return [name for name, _ in model.named_parameters() if name.startswith(f"{head}.")]


def train(client: Client) -> Mapping[str, Tensor]:
    return {"delta": client.descend() - client.model}
