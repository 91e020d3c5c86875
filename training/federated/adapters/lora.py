"""LoRA: A and B beside frozen matrices are trained, travel and are averaged (Hu et al., 2021, arXiv 2106.09685).

Rank, alpha, dropout and matrices are the recipe's own lora_* options. The mean of products BA is not the product of
the means, so the server's model is not the mean of the clients' models: see ffa_lora.
"""

from __future__ import annotations

from training.data import Task
from training.federated.adapters._checks import check_lora as check

__all__ = ["BESIDE", "adapt", "check"]
BESIDE = True


def adapt(task: Task) -> Task:
    """As the recipe has built it: it knows where they belong."""
    return task
