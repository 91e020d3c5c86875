"""What a federation trains: a recipe's task, and where the numbers of its model lie."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from training.config.choices import Value
from training.data import Task
from training.federated.layout import Layout
from training.federation.parts import Algorithm

STATISTICS = "statistics"
"""What is sent beside the algorithm's own: running means and variances, where the model has any."""
PERSONAL = "personal"
"""What is kept beside the algorithm's own: the part of the model that never travels."""


@dataclass(frozen=True)
class Model:
    """What is trained, and where its numbers lie."""

    task: Task
    weights: Layout
    statistics: Layout
    algorithm: Algorithm
    options: Mapping[str, Value]
    """The algorithm's."""
    device: torch.device
    dtype: torch.dtype
    """Of the weights."""
    constants: Mapping[str, Tensor] = field(default_factory=dict)
    """What is not trained, but lies in checkpoints, too."""

    @cached_property
    def numbers(self) -> int:
        """Of all parameters, those that are not trained with them."""
        return sum(parameter.numel() for parameter in self.task.model.parameters())


def normalises(model: nn.Module) -> list[str]:
    """The tensors of its layers that normalise over a batch, running ones with them."""
    return [
        f"{name}.{own}" if name else own
        for name, module in model.named_modules()
        if isinstance(module, _NormBase)
        for own in dict([*module.named_parameters(), *module.named_buffers()])
    ]
