"""The ranks of `cp` hold parts of each context; keys and values are gathered (Llama 3, arXiv 2407.21783, §3.3).

A rank's tokens are one chunk from the front and one from the back, so that all have as much to attend to.
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
    """Each rank has two chunks of equal size."""
    cp, dims = shape["cp"], shape.dims
    if dims is None:
        raise Misfit("mesh.cp", "this recipe's model has no context that could be cut. Leave the axis out.")
    if dims.context % (2 * cp):
        # An odd one has no halves: it can't be cut at all.
        fits = nearest_divisors(cp, 1 if dims.context % 2 else gcd(shape.ranks_for("cp"), dims.context // 2))
        raise Misfit("mesh.cp", f"the context, {dims.context}, does not fall into 2 × {cp} chunks. {fits}")


def apply(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    from training.parallel._gathered import GatheredAttention

    axis = mesh["cp"]
    whole: Any = model
    mine = places(whole.dims.context, axis.get_local_rank(), axis.size())
    whole.positions = functools.cache(mine.to)
    attend = GatheredAttention(whole.dims.context, axis)
    for block in whole.blocks.values():
        block.attention.attend = attend
    return model


def divide(batch: Batch, mesh: DeviceMesh) -> Batch:
    """This rank's tokens of a batch of (samples, T) tensors."""
    axis = mesh["cp"]

    def part(tensor: Tensor) -> Tensor:
        mine = places(tensor.shape[1], axis.get_local_rank(), axis.size())
        return tensor[:, mine.to(tensor.device)]

    return tuple(part(tensor) for tensor in batch)


def has_own_tokens(**options: object) -> bool:
    return True


def places(context: int, rank: int, count: int) -> torch.Tensor:
    """Which places of a sample a rank has: chunk `rank` and chunk 2·count − 1 − rank, (context / count,) int64."""
    import torch

    chunks = torch.arange(context).chunk(2 * count)
    return torch.cat((chunks[rank], chunks[2 * count - 1 - rank]))
