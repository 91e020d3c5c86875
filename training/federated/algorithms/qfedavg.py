"""q-FedAvg: clients with a higher loss get more weight, for fairness (Li et al., 2019, arXiv 1905.10497).

It minimises Σ (nᵢ/n) Fᵢ^(q+1) / (q+1). The paper selects clients by their share of the samples and weights them
equally; here any selection works, and updates are weighted by samples: with q = 0 it is FedAvg.

**It needs several times the rounds of FedAvg**: the estimated curvature of the loss bounds each step, and grows with
the square of the length of a client's update, so the longer clients train in a round the shorter the server's steps
are. After few rounds its worst client may be worse than FedAvg's; docs/reference/federated-gallery.md has both.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated

if TYPE_CHECKING:
    from torch import Tensor

    from training.federated.client import Client
    from training.federated.server import ServerRound

SENT = {"delta": "samples", "curvature": "samples"}
ALLOWS_MOMENTUM = False  # 1/η stands for the curvature of the loss along plain steps
USES_ALL_SAMPLES = True
MIN_LOSS = 1e-10
"""Lower bound of a loss, which may be 0 and is raised to q − 1."""


def train(
    client: Client,
    *,
    q: Annotated[float, "0..20", "q: the larger, the more weight for high losses; 0: FedAvg."] = 1.0,
) -> Mapping[str, Tensor]:
    loss = client.loss(client.model).clamp(min=MIN_LOSS)
    scaled_delta = (client.descend() - client.model) / client.learning_rate
    weight = loss**q
    curvature = q * loss ** (q - 1) * scaled_delta.square().sum() + weight / client.learning_rate
    return {"delta": weight * scaled_delta, "curvature": curvature}


def aggregate(server: ServerRound, **options: object) -> Tensor:
    """Return the next model. The paper's estimate of the curvature, 1/η at first, sets the length of the step."""
    return server.model + server.mean["delta"] / server.mean["curvature"]
