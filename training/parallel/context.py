"""The ranks of `cp` have parts of each context; keys and values are gathered (Llama 3, arXiv 2407.21783, §3.3).

A rank's tokens are one chunk from the front and one from the back, so that all ranks have the same amount of attention.
"""

from __future__ import annotations

import functools
from math import gcd
from typing import TYPE_CHECKING, Any

from training.config.shape import Misfit, Shape, nearest_divisors

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn
    from torch.distributed.device_mesh import DeviceMesh

    from training.data import Batch

AXES = ("cp",)


def check(shape: Shape, **options: object) -> None:
    """Check that each rank has two chunks of equal size."""
    cp, dims = shape["cp"], shape.dims
    if dims is None:
        raise Misfit("mesh.cp", "this recipe's model has no context to split. Leave the axis out.")
    if dims.context % (2 * cp):
        # An odd context cannot be split at all.
        fits = nearest_divisors(cp, 1 if dims.context % 2 else gcd(shape.ranks_for("cp"), dims.context // 2))
        raise Misfit("mesh.cp", f"the context, {dims.context}, does not fall into 2 × {cp} chunks. {fits}")


def apply(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    from training.parallel._gathered_attention import GatheredAttention

    axis = mesh["cp"]
    llama: Any = model
    local_positions = positions(llama.dims.context, axis.get_local_rank(), axis.size())
    llama.positions = functools.cache(local_positions.to)
    attend = GatheredAttention(llama.dims.context, axis)
    for block in llama.blocks.values():
        block.attention.attend = attend
    return model


def divide(batch: Batch, mesh: DeviceMesh) -> Batch:
    """Return this rank's tokens of a batch of (samples, T) tensors."""
    axis = mesh["cp"]

    def part(tensor: Tensor) -> Tensor:
        local_positions = positions(tensor.shape[1], axis.get_local_rank(), axis.size())
        return tensor[:, local_positions.to(tensor.device)]

    return tuple(part(tensor) for tensor in batch)


def splits_tokens(**options: object) -> bool:
    return True


def positions(context: int, rank: int, count: int) -> torch.Tensor:
    """Return which positions of a sample a rank has: chunks `rank` and 2·count − 1 − rank, (context / count,) int64."""
    import torch

    chunks = torch.arange(context).chunk(2 * count)
    return torch.cat((chunks[rank], chunks[2 * count - 1 - rank]))
