"""The model that a federation trains: a recipe's task, and the layout of its parameters and statistics."""

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
"""The name under which running means and variances are sent, in addition to what the algorithm sends."""
PERSONAL = "personal"
"""The name under which a client stores the part of the model that never travels, in addition to the algorithm's
state."""


@dataclass(frozen=True)
class Model:
    """A recipe's task, the algorithm, and the layout of the model as vectors."""

    task: Task
    weights: Layout
    statistics: Layout
    algorithm: Algorithm
    options: Mapping[str, Value]
    """The algorithm's options."""
    device: torch.device
    dtype: torch.dtype
    """The dtype of the weights."""
    constants: Mapping[str, Tensor] = field(default_factory=dict)
    """Frozen tensors that checkpoints store nevertheless, by name."""

    @cached_property
    def parameter_count(self) -> int:
        """Return the number of all parameters, frozen ones included."""
        return sum(parameter.numel() for parameter in self.task.model.parameters())


def batch_norm_tensors(model: nn.Module) -> list[str]:
    """Return the names of the parameters and buffers of layers that normalise over a batch."""
    return [
        f"{name}.{tensor}" if name else tensor
        for name, module in model.named_modules()
        if isinstance(module, _NormBase)
        for tensor in dict([*module.named_parameters(), *module.named_buffers()])
    ]
