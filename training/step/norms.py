"""Compute the norm of the whole gradient, however the parameters are distributed over the mesh."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from training.config.shape import Shape
from training.step.optimizer import gradients_of, local


class GradientNorm:
    """Computes the norm of the whole gradient, equal on all ranks.

    Squares of local parts, each divided by the number of ranks with the same part, are summed.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], shape: Shape, *, independent: bool = False) -> None:
        """`independent`: replicas do not average their gradients.

        The result is then the root mean square of their norms, so that clipping and guards decide alike on all of them.
        """
        self._parameters = list(parameters)
        shares = [_parts(parameter) * shape["pp"] / shape.world_size for parameter in self._parameters]
        self._is_local = not independent and all(share == 1 / shape.world_size for share in shares)
        self._shares = torch.tensor(shares, device=local(self._parameters[0]).device)

    def __call__(self) -> Tensor:
        """Return a float32 scalar on the device, from gradients distributed like their parameters."""
        norms = torch.stack(torch._foreach_norm(gradients_of(self._parameters))).float()
        if self._is_local:  # every rank has the whole gradient
            whole: Tensor = torch.linalg.vector_norm(norms)
            return whole
        total = (norms.square() * self._shares).sum()
        dist.all_reduce(total)
        return total.sqrt()


def _parts(parameter: Tensor) -> int:
    """Return into how many parts the ranks of its mesh have divided a parameter."""
    count = 1
    mesh = getattr(parameter, "device_mesh", None)
    for dim, placement in enumerate(getattr(parameter, "placements", ())):
        if not placement.is_replicate():
            count *= mesh.size(dim)  # type: ignore[union-attr]
    return count
