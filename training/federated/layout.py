"""The layout of a model's tensors in one flat vector.

Algorithms compute with vectors, as their papers do, and messages are parts of them; only the model's forward pass needs
tensors, which are views. The part that stays with each client (`personal`) is at the end, so that what travels is a
slice.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Layout:
    """Tensors by name, in the order in which they lie in the vector."""

    shapes: Mapping[str, torch.Size]
    shared: int
    """Length of the shared part, at the beginning; the rest stays with each client."""

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor], is_personal: Callable[[str], bool] = lambda name: False) -> Layout:
        ordered = sorted(tensors, key=is_personal)  # stable: within each part in the model's order
        shapes = {name: tensors[name].shape for name in ordered}
        return cls(shapes, sum(shapes[name].numel() for name in ordered if not is_personal(name)))

    @cached_property
    def sizes(self) -> list[int]:
        return [shape.numel() for shape in self.shapes.values()]

    @property
    def size(self) -> int:
        return sum(self.sizes)

    @property
    def shared_shapes(self) -> dict[str, torch.Size]:
        """Return the shapes of the shared tensors, which a message holds, by name."""
        found, end = {}, 0
        for name, shape in self.shapes.items():
            if end >= self.shared:
                break
            found[name], end = shape, end + shape.numel()
        return found

    def vector(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Return the tensors as one vector (size,): a copy."""
        parts = [tensors[name].detach().flatten() for name in self.shapes]
        return torch.cat(parts) if parts else torch.zeros(0)

    def tensors(self, vector: Tensor) -> dict[str, Tensor]:
        """Return views of a vector (…, size) by name, each (…, *shape)."""
        parts = zip(torch.split(vector, self.sizes, dim=-1), self.shapes.items(), strict=True)
        return {name: part.view((*vector.shape[:-1], *shape)) for part, (name, shape) in parts}


def parameters(model: nn.Module) -> dict[str, Tensor]:
    """Return the trained parameters by name, tied ones once."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def statistics(model: nn.Module) -> dict[str, Tensor]:
    """Return the floating-point buffers, which training may change: running means and variances."""
    return {name: buffer for name, buffer in model.named_buffers() if buffer.is_floating_point()}
