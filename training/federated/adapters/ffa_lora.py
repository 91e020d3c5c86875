"""FFA-LoRA: LoRA with a fixed random A; only B is trained and travels (Sun et al., 2024, arXiv 2403.12313).

With the same A everywhere the mean of products BA is the product of the means: the server's model is the mean of the
clients' models. For square matrices it sends half of what LoRA does.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from training.data import Task
from training.federated.adapters._checks import check_lora as check

if TYPE_CHECKING:
    from torch import nn

__all__ = ["KEEPS_BASE", "adapt", "check", "constants"]
KEEPS_BASE = True


def adapt(task: Task) -> Task:
    for name in constants(task.model):
        task.model.get_parameter(name).requires_grad_(False)
    return task


def constants(model: nn.Module) -> Collection[str]:
    """Return the names of all A, without which a checkpoint would be no complete adapter."""
    from training.weights.lora import PART

    return [name for name, _ in model.named_parameters() if (part := PART.search(name)) and part["side"] == "A"]
