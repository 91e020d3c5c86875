"""A model as one vector: where each of its tensors lies in it.

Algorithms compute with vectors, as their papers do, and messages are parts of them; only the model's own forward pass
wants tensors, which are views. What is the client's own (`personal`) lies at the end, so that what travels is a slice.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Layout:
    """Tensors by name, one after the other."""

    shapes: Mapping[str, torch.Size]
    shared: int
    """How many numbers, from the start, are everybody's; the rest stays with each client."""

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor], is_personal: Callable[[str], bool] = lambda name: False) -> Layout:
        ordered = sorted(tensors, key=is_personal)  # stable: as the model has them within each part
        shapes = {name: tensors[name].shape for name in ordered}
        return cls(shapes, sum(shapes[name].numel() for name in ordered if not is_personal(name)))

    @cached_property
    def sizes(self) -> list[int]:
        return [shape.numel() for shape in self.shapes.values()]

    @property
    def size(self) -> int:
        return sum(self.sizes)

    @property
    def travelling(self) -> dict[str, torch.Size]:
        """The tensors that a message of the shared part holds."""
        found, end = {}, 0
        for name, shape in self.shapes.items():
            if end >= self.shared:
                break
            found[name], end = shape, end + shape.numel()
        return found

    def vector(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """(size,): a copy."""
        parts = [tensors[name].detach().flatten() for name in self.shapes]
        return torch.cat(parts) if parts else torch.zeros(0)

    def tensors(self, vector: Tensor) -> dict[str, Tensor]:
        """(…, size) → views of it by name, (…, *shape)."""
        parts = zip(torch.split(vector, self.sizes, dim=-1), self.shapes.items(), strict=True)
        return {name: part.view((*vector.shape[:-1], *shape)) for part, (name, shape) in parts}


def parameters(model: nn.Module) -> dict[str, Tensor]:
    """Those that are trained, a shared one once."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def statistics(model: nn.Module) -> dict[str, Tensor]:
    """What changes as a model is trained and is no parameter: running means and variances.

    Whole numbers are `counters`.
    """
    return {name: buffer for name, buffer in model.named_buffers() if buffer.is_floating_point()}


def counters(model: nn.Module) -> dict[str, Tensor]:
    """Whole numbers that may change as a model is trained: how many batches there were. Nothing that we run reads them.

    What goes through torch.func is given copies: it may change nothing that comes from outside.
    """
    return {name: buffer for name, buffer in model.named_buffers() if not buffer.is_floating_point()}
