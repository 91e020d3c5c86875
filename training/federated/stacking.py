"""Which models' clients can be computed together, as far as that is known without trying."""

from __future__ import annotations

from torch.nn.modules.batchnorm import _NormBase

from training.federated.working import Model
from training.federation.config import FederationConfig

STACKED_PARAMETERS = 100_000
"""Models of more are computed one by one: at 85,000 stacking was twice as fast on a CPU, at 814,000 it lost."""


def why_alone(config: FederationConfig, model: Model) -> str:
    """Why a model's clients can't be stacked, as far as that is known without trying; "": they can."""
    task = model.task
    if task.each is None:
        return f"{config.recipe} knows no loss of a single sample, by which places without one are left out"
    if (numbers := model.weights.size) > STACKED_PARAMETERS:
        return f"it trains {numbers:,} parameters, more than {STACKED_PARAMETERS:,}"
    if any(isinstance(module, _NormBase) and module.training for module in task.model.modules()):
        return "it normalises over whole batches, which places without a sample would change"
    return ""
