"""FedAsync: models are mixed in as they arrive, old ones less; no proximal term unless asked (2019, arXiv 1903.03934).

**It differs from the paper** (Xie et al.), whose clients descend f(w) + ρ/2 ‖w - x‖², x being the model that they were
sent: `proximal` is ρ, 0 here if nothing is said. The paper offers several factors for age; here it is the polynomial.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated

if TYPE_CHECKING:
    from torch import Tensor

    from training.federated.client import Client
    from training.federated.server import Round

SENT = {"model": "samples"}
PACES = ("asynchronous",)


def train(
    client: Client,
    *,
    proximal: Annotated[
        float, "0..1000", "ρ: how strongly clients are held near the model that they were sent; 0: not at all."
    ] = 0.0,
    **options: object,
) -> Mapping[str, Tensor]:
    def held(w: Tensor, gradient: Tensor) -> Tensor:
        return gradient + proximal * (w - client.model)

    return {"model": client.descend(held) if proximal else client.descend()}


def aggregate(
    server: Round,
    *,
    mixing: Annotated[float, "0.001..1", "α: the part of a fresh update in the new model."] = 0.6,
    **options: object,
) -> Tensor:
    """x ← (1 - α s) x + α s x_new, s by its age; the pace has weighted both by it."""
    return (1 - mixing * server.discount) * server.model + mixing * server.mean["model"]
