"""FFA-LoRA: LoRA whose A stays as the seed gives it; B alone is trained and travels (Sun et al., 2024, 2403.12313).

With A the same everywhere the mean of products BA is the product of the means: the server's model is the mean of the
clients' models; and of square matrices it sends half of what LoRA does.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from training.data import Task
from training.federated.adapters._checks import check_lora as check

if TYPE_CHECKING:
    from torch import nn

__all__ = ["BESIDE", "adapt", "check", "constants"]
BESIDE = True


def adapt(task: Task) -> Task:
    for name in constants(task.model):
        task.model.get_parameter(name).requires_grad_(False)
    return task


def constants(model: nn.Module) -> Collection[str]:
    """Each A, without which a checkpoint would be no adapter to anybody."""
    from training.weights.lora import PART

    return [name for name, _ in model.named_parameters() if (part := PART.search(name)) and part["side"] == "A"]
