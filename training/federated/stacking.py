"""Which models' clients can be computed together, as far as that is known without trying."""

from __future__ import annotations

from torch.nn.modules.batchnorm import _NormBase

from training.federated.model import Model
from training.federated.schedule import STACKED_NUMBERS
from training.federation.config import FederationConfig

STACKED_PARAMETERS = 100_000
"""Models that train more are computed one by one: at 85,000 stacking was twice as fast on a CPU, at 814,000 it lost.

What is not trained counts less: with adapters beside 870,000 frozen numbers stacking still won.
"""


def why_alone(config: FederationConfig, model: Model) -> str:
    """Why a model's clients can't be stacked, as far as that is known without trying; "": they can."""
    task = model.task
    if task.descend is not None:
        return "its clients train in a way of their own"
    if task.each is None:
        return f"{config.recipe} knows no loss of a single sample, by which places without one are left out"
    if (numbers := model.weights.size) > STACKED_PARAMETERS:
        return f"it trains {numbers:,} parameters, more than {STACKED_PARAMETERS:,}"
    if 2 * model.numbers > STACKED_NUMBERS:
        return f"of its {model.numbers:,} parameters, those that are not trained with them, no two clients are stacked"
    if any(isinstance(module, _NormBase) and module.training for module in task.model.modules()):
        return "it normalises over whole batches, which places without a sample would change"
    return ""
