"""FedNS: a Newton step from sketches of the clients' Hessians (Li et al., 2024, arXiv 2401.02734)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Literal

from training.federated.algorithms._newton import check, newton_step, sketched_hessian, squared_root

if TYPE_CHECKING:
    from torch import Tensor

    from training.federated.client import Client
    from training.federated.controller import Controller

__all__ = ["check", "fold", "run_round", "train"]
SENT = {"loss": "samples", "gradient": "samples", "root": "samples"}
USES_ALL_SAMPLES = True
TAKES_STEPS = False
ALLOWS_MOMENTUM = False
ALLOWS_WEIGHT_DECAY = False
fold = squared_root


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
    **options: object,
) -> Tensor:
    answer = controller.train()
    start = controller.server.shared.double()
    matrix = answer.mean["root"].view(len(start), len(start))
    return newton_step(controller, start, answer, matrix, line_search=line_search)
