"""Share what Newton-type algorithms need: clients' Hessians and sketches, the server's step and its line search."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from training.config.shape import Misfit

if TYPE_CHECKING:
    from torch import Tensor

    from training.federated.client import Client
    from training.federated.controller import Controller
    from training.federated.task_results import TaskResult
    from training.federation.config import FederationConfig

HALVINGS = 20
"""Step lengths that a line search tries in one exchange: 1, 1/2, 1/4, …"""
DECREASE = 1e-4
"""Fraction of the decrease predicted by the gradient that a step must achieve (Armijo's rule)."""


def check(config: FederationConfig) -> Iterator[Misfit]:
    """Yield settings without small convex models: the whole Hessian of each client is computed."""
    if config.recipe != "tabular" or config.recipe_options().get("model") == "mlp":
        message = f'"{config.algorithm}" is for convex models. Write recipe = "tabular", and model = "logistic" there.'
        yield Misfit("algorithm", message)
    if config.pace != "rounds":
        yield Misfit(
            "pace", f'is "{config.pace}", but {config.algorithm} needs several exchanges with all clients in a round.'
        )


def hessian(client: Client, w: Tensor) -> Tensor:
    """Return the Hessian (parameters, parameters) of the mean loss over all samples of the client."""
    from training.federated.differentiation import grad, jacrev

    return jacrev(grad(client.loss))(w)


def matrix_square_root(matrix: Tensor) -> Tensor:
    """Return a square root R (parameters, parameters) of a positive semi-definite matrix RᵀR."""
    import torch

    values, vectors = torch.linalg.eigh(matrix)
    square_root: Tensor = values.clamp(min=0).sqrt()[:, None] * vectors.mT
    return square_root


def sketch(rows: int, like: Tensor, *, kind: str) -> Tensor:
    """Return a random S (rows, parameters) with E SᵀS = 1.

    orthogonal: √(d/k) times orthonormal rows; gaussian: independent normal entries.
    """
    import torch

    parameters = like.shape[-1]
    drawn = torch.randn(parameters, rows, dtype=like.dtype, device=like.device)
    if kind == "gaussian":
        return drawn.T / math.sqrt(rows)
    basis: Tensor = torch.linalg.qr(drawn).Q
    return basis.T * math.sqrt(parameters / rows)


def sketched_hessian(client: Client, rows: int, kind: str) -> Mapping[str, Tensor]:
    """Return loss, gradient, and the sketched root of the Hessian at the model that the client was sent."""
    w = client.model
    root = matrix_square_root(hessian(client, w))
    sketched = sketch(min(rows, len(w)), w, kind=kind) @ root
    return {"loss": client.loss(w), "gradient": client.whole_gradient(w), "root": sketched}


def squared_root(sent: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Return what the server sums: the matrix RᵀR in place of its root R."""
    return {**sent, "root": sent["root"].mT @ sent["root"]}


def newton_step(
    controller: Controller, start: Tensor, answer: TaskResult, matrix: Tensor, *, line_search: bool
) -> Tensor:
    """Return start - μ H⁻¹ g, with μ by Armijo's rule, which takes one more exchange, or 1."""
    gradient = answer.mean["gradient"]
    direction = _solve(matrix, gradient)
    if not line_search:
        return start - direction
    return start - _step_length(controller, start, answer.mean["loss"], gradient, direction) * direction


def _solve(matrix: Tensor, right: Tensor) -> Tensor:
    """Return the solution of least norm for a symmetric matrix, which is singular if sketches are few and small.

    It uses eigenvalues: LAPACK's least squares gave different last bits from call to call.
    """
    import torch

    values, vectors = torch.linalg.eigh(matrix)
    is_nonzero = values > values.abs().max() * len(values) * torch.finfo(values.dtype).eps
    found: Tensor = vectors @ torch.where(is_nonzero, (vectors.T @ right) / torch.where(is_nonzero, values, 1.0), 0.0)
    return found


def _step_length(controller: Controller, start: Tensor, loss: Tensor, gradient: Tensor, direction: Tensor) -> float:
    """Return the largest of 1, 1/2, 1/4, … that decreases the loss enough; 0 if none does."""
    import torch

    lengths = 0.5 ** torch.arange(HALVINGS, dtype=start.dtype, device=start.device)

    def losses_along(client: Client) -> Mapping[str, Tensor]:
        step = client.server["direction"]
        found = [client.loss(client.model - length * step) for length in lengths.to(step.dtype)]
        return {"losses": torch.stack(found)}

    found = controller.query("line", losses_along, {"losses": "samples"}, vectors={"direction": direction}, model=start)
    enough = found.mean["losses"] <= loss - DECREASE * lengths * (gradient @ direction)
    return float(lengths[enough.nonzero()[0, 0]]) if bool(enough.any()) else 0.0
