"""DiLoCo: AdamW on clients, Nesterov on the server; by samples, in the paper equally (2023, arXiv 2311.08105).

**It differs from the paper**, which weights all workers equally: `weights = "equal"` does that. The paper's workers all
have equally many samples, ours do not.

Each client stores the moments of its AdamW from round to round, as the paper's workers do; they never travel. The run's
`learning_rate` is AdamW's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Literal

if TYPE_CHECKING:
    from torch import Tensor

    from training.federated.client import Client
    from training.federated.server import ServerRound

SENT = {"delta": "samples"}
CHOOSES_WEIGHTS = True
ALLOWS_MOMENTUM = False
ALLOWS_WEIGHT_DECAY = False  # AdamW's weight decay is an option of this module


def initial_client_state(model: Tensor, **options: object) -> Mapping[str, Tensor]:
    nothing = model.new_zeros(len(model))
    return {"first": nothing, "second": nothing, "steps": model.new_zeros(())}


def initial_server_state(model: Tensor, **options: object) -> Mapping[str, Tensor]:
    return {"velocity": model.new_zeros(len(model))}


def train(
    client: Client,
    *,
    beta1: Annotated[float, "0..0.999999", "AdamW's decay of the first moment."] = 0.9,
    beta2: Annotated[float, "0..0.999999", "AdamW's decay of the second moment."] = 0.999,
    epsilon: Annotated[float, "1e-12..1", "AdamW's ε, added to the root of the second moment."] = 1e-8,
    weight_decay: Annotated[float, "0..1", "AdamW's weight decay."] = 0.1,
    **options: object,
) -> Mapping[str, Tensor]:
    w, rate = client.model, client.learning_rate
    first, second, steps = (client.state[name] for name in ("first", "second", "steps"))
    for step in range(client.steps):
        gradient = client.gradient(w, step)
        steps = steps + 1
        first = beta1 * first + (1 - beta1) * gradient
        second = beta2 * second + (1 - beta2) * gradient.square()
        root = (second / (1 - beta2**steps)).sqrt() + epsilon
        w = w - rate * (weight_decay * w + first / (1 - beta1**steps) / root)
    client.state.update(first=first, second=second, steps=steps)
    return {"delta": w - client.model}


def aggregate(
    server: ServerRound,
    *,
    outer_learning_rate: Annotated[float, "0.000001..10", "The server's learning rate along the mean update."] = 0.7,
    outer_momentum: Annotated[float, "0..0.999", "Nesterov momentum of the server; 0: plain SGD."] = 0.9,
    weights: Annotated[Literal["samples", "equal"], "Weights of the updates; equal is the paper's."] = "samples",
    **options: object,
) -> Tensor:
    delta = server.mean["delta"]
    server.memory["velocity"] = outer_momentum * server.memory["velocity"] + delta
    return server.model + outer_learning_rate * (delta + outer_momentum * server.memory["velocity"])
