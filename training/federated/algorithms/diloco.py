"""DiLoCo: AdamW inside, Nesterov outside, for long rounds; by samples, in the paper equally (2023, arXiv 2311.08105).

**It differs from the paper** (Douillard et al.), where each worker counts one: `weights = "equal"` is that. The paper's
workers all have as much, ours have not.

Each client keeps the moments of its AdamW from round to round, as each of the paper's workers does; they never travel.
`learning_rate` of the run is AdamW's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Literal

if TYPE_CHECKING:
    from torch import Tensor

    from training.federated.client import Client
    from training.federated.server import Round

SENT = {"delta": "samples"}
CHOOSES_WEIGHTS = True
MOMENTUM = False
WEIGHT_DECAY = False  # it has an option of that name: AdamW's


def begin(model: Tensor, **options: object) -> Mapping[str, Tensor]:
    nothing = model.new_zeros(len(model))
    return {"first": nothing, "second": nothing, "steps": model.new_zeros(())}


def memory(model: Tensor, **options: object) -> Mapping[str, Tensor]:
    return {"velocity": model.new_zeros(len(model))}


def train(
    client: Client,
    *,
    beta1: Annotated[float, "0..0.999999", "AdamW's, of the first moment."] = 0.9,
    beta2: Annotated[float, "0..0.999999", "AdamW's, of the second moment."] = 0.999,
    epsilon: Annotated[float, "1e-12..1", "AdamW's, added to the root of the second moment."] = 1e-8,
    weight_decay: Annotated[float, "0..1", "AdamW's."] = 0.1,
    **options: object,
) -> Mapping[str, Tensor]:
    w, rate = client.model, client.learning_rate
    first, second, steps = (client.kept[name] for name in ("first", "second", "steps"))
    for step in range(client.steps):
        gradient = client.gradient(w, step)
        steps = steps + 1
        first = beta1 * first + (1 - beta1) * gradient
        second = beta2 * second + (1 - beta2) * gradient.square()
        root = (second / (1 - beta2**steps)).sqrt() + epsilon
        w = w - rate * (weight_decay * w + first / (1 - beta1**steps) / root)
    client.kept.update(first=first, second=second, steps=steps)
    return {"delta": w - client.model}


def aggregate(
    server: Round,
    *,
    outer_learning_rate: Annotated[float, "0.000001..10", "How far along the clients' mean way."] = 0.7,
    outer_momentum: Annotated[float, "0..0.999", "Nesterov's; 0: plain SGD."] = 0.9,
    weights: Annotated[
        Literal["samples", "equal"], "What an update counts by; equal, as in the paper: each counts one."
    ] = "samples",
    **options: object,
) -> Tensor:
    delta = server.mean["delta"]
    server.memory["velocity"] = outer_momentum * server.memory["velocity"] + delta
    return server.model + outer_learning_rate * (delta + outer_momentum * server.memory["velocity"])
