"""FLeNS: sketched Newton steps from the look-ahead point of Nesterov's momentum (2024, arXiv 2409.15216).

The shapes in the published text do not match, and the published code never uses its momentum point, so with equal
sketch sizes it is FedNS. Our reading: v = w + β (w - w₋), β = (t - 1)/(t + 2), and the step starts from v; β is 0 where
the loss at v is above that at w, otherwise it diverges.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Literal

from training.federated.algorithms._newton import check, newton_step, sketched_hessian, squared_root

if TYPE_CHECKING:
    from torch import Tensor

    from training.federated.client import Client
    from training.federated.controller import Controller

__all__ = ["check", "fold", "initial_server_state", "run_round", "train"]
SENT = {"loss": "samples", "gradient": "samples", "root": "samples"}
USES_ALL_SAMPLES = True
TAKES_STEPS = False
ALLOWS_MOMENTUM = False
ALLOWS_WEIGHT_DECAY = False
fold = squared_root


def initial_server_state(model: Tensor, **options: object) -> Mapping[str, Tensor]:
    """Return the previous model."""
    return {"previous": model.clone()}


def train(
    client: Client,
    *,
    rows: Annotated[int, "1..2000", "Rows of each sketch: a client sends rows × parameters, and its gradient."] = 15,
    sketch: Annotated[
        Literal["orthogonal", "gaussian"],
        "Orthogonal rows halve the rounds with half as many rows as parameters.",
    ] = "orthogonal",
    **options: object,
) -> Mapping[str, Tensor]:
    return sketched_hessian(client, rows, sketch)


def run_round(
    controller: Controller,
    *,
    line_search: Annotated[bool, "Step length by Armijo's rule, which takes one more exchange; else 1."] = True,
    momentum: Annotated[bool, "Start from the look-ahead point; false: FedNS."] = True,
    **options: object,
) -> Tensor:
    server = controller.server
    here = server.shared.double().clone()  # a copy: server.shared becomes the next model
    start = here
    if momentum and controller.round > 1:
        ahead = here + (controller.round - 1) / (controller.round + 2) * (here - server.memory["previous"])
        start = ahead if _is_lower(controller, ahead, here) else here
    answer = controller.train(model=start)
    matrix = answer.mean["root"].view(len(start), len(start))
    model = newton_step(controller, start, answer, matrix, line_search=line_search)
    server.memory["previous"] = here  # last: a lost line search must leave the state as it was
    return model


def _is_lower(controller: Controller, ahead: Tensor, here: Tensor) -> bool:
    """Return whether the loss at `ahead` is at most that at `here`, by one more exchange of two values per client."""

    def losses(client: Client) -> Mapping[str, Tensor]:
        return {"ahead": client.loss(client.server["ahead"]), "here": client.loss(client.server["here"])}

    weights = {"ahead": "samples", "here": "samples"}
    found = controller.query("ahead", losses, weights, vectors={"ahead": ahead, "here": here})
    return bool(found.mean["ahead"] <= found.mean["here"])
