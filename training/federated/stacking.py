"""Decide whether a model's clients can be stacked, as far as that is known without trying."""

from __future__ import annotations

from torch.nn.modules.batchnorm import _NormBase

from training.federated.model import Model
from training.federated.schedule import CHUNK_PARAMETERS
from training.federation.config import FederationConfig

STACKED_PARAMETERS = 100_000
"""Clients of models with more trained parameters are computed one by one: at 85,000 parameters stacking was twice as
fast on a CPU, at 814,000 it was slower.

Frozen parameters count less: with adapters and 870,000 frozen parameters stacking was still faster.
"""


def unstacked_reason(config: FederationConfig, model: Model) -> str:
    """Return why a model's clients cannot be stacked, as far as that is known without trying; "" if they can."""
    task = model.task
    if task.descend is not None:
        return "its clients train with train() of client.py"
    if task.score_samples is None:
        return f"{config.recipe} has no loss of single samples, so padding could not be masked"
    if (trained := model.weights.size) > STACKED_PARAMETERS:
        return f"it trains {trained:,} parameters, more than {STACKED_PARAMETERS:,}"
    if 2 * model.parameter_count > CHUNK_PARAMETERS:
        count = f"{model.parameter_count:,} parameters, frozen ones included,"
        return f"two clients with all its {count} are too large to stack"
    if any(isinstance(module, _NormBase) and module.training for module in task.model.modules()):
        return "it normalises over batches, which padding would change"
    return ""
