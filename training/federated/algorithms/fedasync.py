"""FedAsync: each model that arrives is mixed into the global one, the older the less (Xie et al., 2019, 1903.03934)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated

if TYPE_CHECKING:
    from torch import Tensor

    from training.federated.client import Client
    from training.federated.server import Round

SENT = {"model": "samples"}
PACES = ("asynchronous",)


def train(client: Client, **options: object) -> Mapping[str, Tensor]:
    return {"model": client.descend()}


def aggregate(
    server: Round, *, mixing: Annotated[float, "0.001..1", "α: the part of a fresh update in the new model."] = 0.6
) -> Tensor:
    """x ← (1 - α s) x + α s x_new, s by its age; the pace has weighted both by it."""
    return (1 - mixing * server.discount) * server.model + mixing * server.mean["model"]
