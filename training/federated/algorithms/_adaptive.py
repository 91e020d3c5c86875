"""What FedAdam, FedYogi and FedAdagrad have in common (Reddi et al., 2020, arXiv 2003.00295, algorithm 2).

Only how the second moment goes on is their own. Nothing is corrected for having begun at 0, as in the paper.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from training.federated.server import Round


def begun(model: Tensor, *, tau: float) -> Mapping[str, Tensor]:
    """The moments before the first round. The paper asks for at least τ² in the second; it is τ²."""
    import torch

    first = torch.zeros_like(model, dtype=torch.float64)
    return {"first": first, "second": torch.full_like(first, tau**2)}


def stepped(
    server: Round, second: Callable[[Tensor, Tensor], Tensor], *, learning_rate: float, beta1: float, tau: float
) -> Tensor:
    """The next model. `second`: (second moment, squares of this round's mean update) → the next second moment."""
    delta, memory = server.mean["delta"], server.memory
    memory["first"] = beta1 * memory["first"] + (1 - beta1) * delta
    memory["second"] = second(memory["second"], delta.square())
    return server.model + learning_rate * memory["first"] / (memory["second"].sqrt() + tau)
