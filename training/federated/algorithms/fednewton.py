"""FedNewton: each client sends its Hessian and gradient, the server takes one Newton step (Nocedal & Wright, 2006)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated

from training.federated.algorithms._newton import check, hessian, newton_step

if TYPE_CHECKING:
    from torch import Tensor

    from training.federated.client import Client
    from training.federated.controller import Controller

__all__ = ["check", "run_round", "train"]
SENT = {"loss": "samples", "gradient": "samples", "hessian": "samples"}
USES_ALL_SAMPLES = True
TAKES_STEPS = False
ALLOWS_MOMENTUM = False
ALLOWS_WEIGHT_DECAY = False


def train(client: Client, **options: object) -> Mapping[str, Tensor]:
    """Return loss, gradient, and the Hessian's upper triangle, d (d + 1) / 2 values."""
    import torch

    matrix = hessian(client, client.model)
    upper = torch.triu_indices(len(matrix), len(matrix), device=matrix.device)
    return {
        "loss": client.loss(client.model),
        "gradient": client.whole_gradient(client.model),
        "hessian": matrix[upper[0], upper[1]],
    }


def run_round(
    controller: Controller,
    *,
    line_search: Annotated[bool, "Step length by Armijo's rule, which takes one more exchange; else 1."] = True,
) -> Tensor:
    import torch

    answer = controller.train()
    start = controller.server.shared.double()
    parameters = len(start)
    upper = torch.triu_indices(parameters, parameters, device=start.device)
    matrix = start.new_zeros(parameters, parameters)
    matrix[upper[0], upper[1]] = answer.mean["hessian"]
    return newton_step(controller, start, answer, matrix + matrix.triu(1).mT, line_search=line_search)
