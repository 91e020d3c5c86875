"""FedBN: batch normalisation layers stay with each client (Li et al., 2021, arXiv 2102.07623)."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor, nn

    from training.federated.client import Client

NEEDS_PERSONAL_TENSORS = True
SENT = {"delta": "samples"}


def personal(model: nn.Module, **options: object) -> Collection[str]:
    """Return the names of their weights, and of their running means and variances."""
    from training.federated.model import batch_norm_tensors

    return batch_norm_tensors(model)


def train(client: Client) -> Mapping[str, Tensor]:
    return {"delta": client.descend() - client.model}
