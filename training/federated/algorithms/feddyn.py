"""FedDyn: each client learns what leads it to what is best for all (Acar et al., 2021, arXiv 2111.04263).

A client keeps its gradient where it ended last. Each client counts one, however many samples it has, as in the paper.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated

if TYPE_CHECKING:
    from torch import Tensor

    from training.federated.client import Client
    from training.federated.server import Round

SENT = {"delta": "clients"}
ADDS_UP_KEPT = True


def begin(model: Tensor, **options: object) -> Mapping[str, Tensor]:
    return {"gradient": model.new_zeros(len(model))}


def memory(model: Tensor, **options: object) -> Mapping[str, Tensor]:
    return {"gradient": model.new_zeros(len(model))}


def train(
    client: Client,
    *,
    alpha: Annotated[
        float, "0.000001..1000", "How strongly clients are held near the model that they were sent."
    ] = 0.1,
) -> Mapping[str, Tensor]:
    own = client.kept["gradient"]

    def held(w: Tensor, gradient: Tensor) -> Tensor:
        return gradient - own + alpha * (w - client.model)

    delta = client.descend(held) - client.model
    client.kept["gradient"] = own - alpha * delta
    return {"delta": delta}


def aggregate(server: Round, **options: float) -> Tensor:
    """The paper's h is the mean of the gradients that clients keep, also those that were not asked.

    So it takes late updates in full (`sum`); only the model's step counts them less (`mean`).
    """
    alpha = options["alpha"]
    server.memory["gradient"] = server.memory["gradient"] - alpha * server.sum["delta"] / server.clients
    return server.model + server.mean["delta"] - server.memory["gradient"] / alpha
