"""LoRA: low-rank A and B for frozen matrices are trained, sent and averaged (Hu et al., 2021, arXiv 2106.09685).

Rank, alpha, dropout and matrices are the recipe's lora_* options. The mean of products BA is not the product of the
means, so the server's model is not the mean of the clients' models: see ffa_lora.
"""

from __future__ import annotations

from training.data import Task
from training.federated.adapters._checks import check_lora as check

__all__ = ["KEEPS_BASE", "adapt", "check"]
KEEPS_BASE = True


def adapt(task: Task) -> Task:
    """Return the task as the recipe has built it, with adapters in place."""
    return task
