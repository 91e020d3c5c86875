"""FedDyn: a dynamic regulariser aligns clients with the global optimum (Acar et al., 2021, arXiv 2111.04263).

A client stores its gradient at the end of its last round. As in the paper, all clients have equal weight.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated

if TYPE_CHECKING:
    from torch import Tensor

    from training.federated.client import Client
    from training.federated.server import ServerRound

SENT = {"delta": "clients"}
SUMS_CLIENT_STATE = True


def initial_client_state(model: Tensor, **options: object) -> Mapping[str, Tensor]:
    return {"gradient": model.new_zeros(len(model))}


def initial_server_state(model: Tensor, **options: object) -> Mapping[str, Tensor]:
    return {"gradient": model.new_zeros(len(model))}


def train(
    client: Client,
    *,
    alpha: Annotated[
        float, "0.000001..1000", "α, the strength of the pull towards the model that clients were sent."
    ] = 0.1,
) -> Mapping[str, Tensor]:
    gradient_of_client = client.state["gradient"]

    def dynamic_direction(w: Tensor, gradient: Tensor) -> Tensor:
        return gradient - gradient_of_client + alpha * (w - client.model)

    delta = client.descend(dynamic_direction) - client.model
    client.state["gradient"] = gradient_of_client - alpha * delta
    return {"delta": delta}


def aggregate(server: ServerRound, **options: float) -> Tensor:
    """Return the next model. The paper's h is the mean of the gradients that all clients store, selected or not.

    So late updates enter it in full (`sum`); only the model's step discounts them (`mean`).
    """
    alpha = options["alpha"]
    server.memory["gradient"] = server.memory["gradient"] - alpha * server.sum["delta"] / server.clients
    return server.model + server.mean["delta"] - server.memory["gradient"] / alpha
