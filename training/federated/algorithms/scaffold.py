"""SCAFFOLD: clients' steps are corrected by control variates (Karimireddy et al., 2019, arXiv 1910.06378).

A client's control variate is that of option II of the paper: its mean gradient in the round. The server's is the mean
over all clients, selected or not; late changes enter it in full, while the model's step discounts late updates. As in
the paper, all clients have equal weight.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated

if TYPE_CHECKING:
    from torch import Tensor

    from training.federated.client import Client
    from training.federated.server import ServerRound

SENT = {"delta": "clients", "change": "clients"}
ALLOWS_MOMENTUM = False  # option II takes delta / (K · η) as the mean gradient of the round
BROADCAST = ("control",)


def initial_client_state(model: Tensor, **options: object) -> Mapping[str, Tensor]:
    return {"control": model.new_zeros(len(model))}


def initial_server_state(model: Tensor, **options: object) -> Mapping[str, Tensor]:
    return {"control": model.new_zeros(len(model))}


def train(client: Client, **options: object) -> Mapping[str, Tensor]:
    control, server_control = client.state["control"], client.server["control"]
    delta = client.descend(lambda w, gradient: gradient - control + server_control) - client.model
    client.state["control"] = control - server_control - delta / (client.steps * client.learning_rate)
    return {"delta": delta, "change": client.state["control"] - control}


def aggregate(
    server: ServerRound,
    *,
    learning_rate: Annotated[float, "0.000001..100", "The server's learning rate along the mean update."] = 1.0,
) -> Tensor:
    server.memory["control"] = server.memory["control"] + server.sum["change"] / server.clients
    return server.model + learning_rate * server.mean["delta"]
