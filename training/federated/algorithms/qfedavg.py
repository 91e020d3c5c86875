"""q-FedAvg: whose loss is higher counts for more, so that nobody is left behind (Li et al., 2019, arXiv 1905.10497).

What becomes least is Σ (nᵢ/n) Fᵢ^(q+1) / (q+1). The paper draws clients by their share of the samples and counts each
one; here any may be drawn, and each counts by its share: with q = 0 that is FedAvg.

**It needs several times the rounds of FedAvg**: the estimate of how far the loss is from straight bounds each step, and
grows with the square of a client's way, so the longer clients train in a round the shorter the server's steps. In few
rounds its worst client may be worse than FedAvg's; docs/federated-gallery.md has both.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated

if TYPE_CHECKING:
    from torch import Tensor

    from training.federated.client import Client
    from training.federated.server import Round

SENT = {"delta": "samples", "curvature": "samples"}
MOMENTUM = False  # 1/η stands for how far the loss is from straight, along plain steps
WHOLE = True
LEAST = 1e-10
"""Of a loss, which may be 0 and is raised to q − 1."""


def train(
    client: Client,
    *,
    q: Annotated[float, "0..20", "How much more; 0: no more, as in FedAvg."] = 1.0,
) -> Mapping[str, Tensor]:
    loss = client.loss(client.model).clamp(min=LEAST)
    way = (client.descend() - client.model) / client.learning_rate
    weight = loss**q
    curvature = q * loss ** (q - 1) * way.square().sum() + weight / client.learning_rate
    return {"delta": weight * way, "curvature": curvature}


def aggregate(server: Round, **options: object) -> Tensor:
    """The paper's estimate of how far the loss is from straight, 1/η at first, sets the length of the step."""
    return server.model + server.mean["delta"] / server.mean["curvature"]
