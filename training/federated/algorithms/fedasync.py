"""FedAsync: models are mixed in as they arrive, old ones less; no proximal term by default (2019, arXiv 1903.03934).

**It differs from the paper**, whose clients minimise f(w) + ρ/2 ‖w - x‖², x being the model that they were sent:
`proximal` is ρ, here 0 by default. The paper offers several discounts for age; this is the polynomial one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated

if TYPE_CHECKING:
    from torch import Tensor

    from training.federated.client import Client
    from training.federated.server import ServerRound

SENT = {"model": "samples"}
PACES = ("asynchronous",)


def train(
    client: Client,
    *,
    proximal: Annotated[
        float, "0..1000", "ρ, the strength of the pull towards the model that clients were sent; 0: none."
    ] = 0.0,
    **options: object,
) -> Mapping[str, Tensor]:
    def proximal_direction(w: Tensor, gradient: Tensor) -> Tensor:
        return gradient + proximal * (w - client.model)

    return {"model": client.descend(proximal_direction) if proximal else client.descend()}


def aggregate(
    server: ServerRound,
    *,
    mixing: Annotated[float, "0.001..1", "α, the share of a fresh update in the new model."] = 0.6,
    **options: object,
) -> Tensor:
    """Return (1 - α s) x + α s x_new; the discount s for age is in server.discount and server.mean already."""
    return (1 - mixing * server.discount) * server.model + mixing * server.mean["model"]
