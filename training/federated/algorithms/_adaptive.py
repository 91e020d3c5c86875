"""Share the server step of FedAdam, FedYogi and FedAdagrad (Reddi et al., 2020, arXiv 2003.00295, algorithm 2).

They differ only in the update of the second moment. As in the paper, there is no bias correction.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from training.federated.server import ServerRound


def initial_moments(model: Tensor, *, tau: float, **options: object) -> Mapping[str, Tensor]:
    """Return the moments before the first round. The paper requires a second moment of at least τ²; it is τ²."""
    import torch

    first = torch.zeros_like(model, dtype=torch.float64)
    return {"first": first, "second": torch.full_like(first, tau**2)}


def adaptive_step(
    server: ServerRound, second: Callable[[Tensor, Tensor], Tensor], *, learning_rate: float, beta1: float, tau: float
) -> Tensor:
    """Return the next model.

    `second`: (second moment, squares of this round's mean update) → the next second moment.
    """
    delta, memory = server.mean["delta"], server.memory
    memory["first"] = beta1 * memory["first"] + (1 - beta1) * delta
    memory["second"] = second(memory["second"], delta.square())
    return server.model + learning_rate * memory["first"] / (memory["second"].sqrt() + tau)
