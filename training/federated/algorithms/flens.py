"""FLeNS: sketched Newton steps from a point that Nesterov's momentum looks ahead to (2024, arXiv 2409.15216).

The published text's shapes do not match, and the published code never uses its momentum point, so that at equal size of
the sketch it is FedNS. This is our reading: v = w + β (w - w₋), β = (t - 1)/(t + 2), the step is taken from v; β is 0
wherever the loss at v is above that at w, without which it diverges.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Literal

from training.federated.algorithms._newton import check, sketched, squared, stepped

if TYPE_CHECKING:
    from torch import Tensor

    from training.federated.client import Client
    from training.federated.controller import Controller

__all__ = ["check", "fold", "memory", "play", "train"]
SENT = {"loss": "samples", "gradient": "samples", "root": "samples"}
WHOLE = True
STEPS = False
MOMENTUM = False
WEIGHT_DECAY = False
fold = squared


def memory(model: Tensor, **options: object) -> Mapping[str, Tensor]:
    """The model before."""
    return {"previous": model.clone()}


def train(
    client: Client,
    *,
    rows: Annotated[int, "1..2000", "Of each sketch: a client sends rows × numbers, beside its gradient."] = 15,
    sketch: Annotated[
        Literal["orthogonal", "gaussian"], "orthogonal rows halve the rounds where there are half as many as numbers."
    ] = "orthogonal",
    **options: object,
) -> Mapping[str, Tensor]:
    return sketched(client, rows, sketch)


def play(
    controller: Controller,
    *,
    line_search: Annotated[bool, "The step's length by Armijo's rule, which takes one more exchange; else 1."] = True,
    momentum: Annotated[bool, "Look ahead; without it is FedNS."] = True,
    **options: object,
) -> Tensor:
    server = controller.server
    here = server.shared.double().clone()  # which is the next one before long
    start = here
    if momentum and controller.round > 1:
        ahead = here + (controller.round - 1) / (controller.round + 2) * (here - server.memory["previous"])
        start = ahead if _is_lower(controller, ahead, here) else here
    answer = controller.train(model=start)
    server.memory["previous"] = here
    matrix = answer.mean["root"].view(len(start), len(start))
    return stepped(controller, start, answer, matrix, line_search=line_search)


def _is_lower(controller: Controller, ahead: Tensor, here: Tensor) -> bool:
    """Whether the loss there is not above that here: one more exchange, of two numbers a client."""

    def losses(client: Client) -> Mapping[str, Tensor]:
        return {"ahead": client.loss(client.server["ahead"]), "here": client.loss(client.server["here"])}

    weights = {"ahead": "samples", "here": "samples"}
    found = controller.ask("ahead", losses, weights, vectors={"ahead": ahead, "here": here})
    return bool(found.mean["ahead"] <= found.mean["here"])
