"""SCAFFOLD: clients' steps are corrected by control variates (Karimireddy et al., 2019, arXiv 1910.06378).

A client's is what option II of the paper makes it: the mean gradient along its way. The server's is the mean over all
clients, also those that were not asked; late changes count in full in it, while the model's step counts late updates
less. Each client counts one, however many samples it has, as in the paper.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated

if TYPE_CHECKING:
    from torch import Tensor

    from training.federated.client import Client
    from training.federated.server import Round

SENT = {"delta": "clients", "change": "clients"}
MOMENTUM = False  # option II takes delta / (K · η) for the mean gradient along the way
BROADCAST = ("control",)


def begin(model: Tensor, **options: object) -> Mapping[str, Tensor]:
    return {"control": model.new_zeros(len(model))}


def memory(model: Tensor, **options: object) -> Mapping[str, Tensor]:
    return {"control": model.new_zeros(len(model))}


def train(client: Client, **options: object) -> Mapping[str, Tensor]:
    own, everybodys = client.kept["control"], client.server["control"]
    delta = client.descend(lambda w, gradient: gradient - own + everybodys) - client.model
    client.kept["control"] = own - everybodys - delta / (client.steps * client.learning_rate)
    return {"delta": delta, "change": client.kept["control"] - own}


def aggregate(
    server: Round,
    *,
    learning_rate: Annotated[float, "0.000001..100", "How far the server goes along the mean update."] = 1.0,
) -> Tensor:
    server.memory["control"] = server.memory["control"] + server.sum["change"] / server.clients
    return server.model + learning_rate * server.mean["delta"]
