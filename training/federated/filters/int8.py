"""Integers of 8 bits with a scale for each block (after QSGD, Alistarh et al., 2017, arXiv 1610.02132).

Stochastic rounding is unbiased. Rounding to the nearest is closer, at most half a step off, but loses for good whatever
never reaches half a step of its block's largest, unless a filter before it sends that later, as topk and delta do. So
stochastic rounding is the default, and nearest is for those two.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Literal

if TYPE_CHECKING:
    from torch import Tensor

    from training.federated.filter_context import FilterContext

STAGE = "width"
MAX_VALUE = 127


def send(
    given: Tensor,
    context: FilterContext,
    *,
    block: Annotated[int, "1..1048576", "Values that share a scale: their largest divided by 127."] = 256,
    rounding: Annotated[
        Literal["stochastic", "nearest"],
        "stochastic: up or down at random, unbiased; nearest: closer, for use after filters that resend what is lost.",
    ] = "stochastic",
) -> tuple[Tensor, Mapping[str, Tensor]]:
    import torch
    from torch.nn.functional import pad

    blocks = pad(given, (0, -context.size % block)).view(len(given), -1, block)
    scale = blocks.abs().amax(dim=2) / MAX_VALUE
    steps = (blocks / torch.where(scale == 0, 1, scale)[..., None]).flatten(1)[:, : context.size]
    steps = steps.round() if rounding == "nearest" else (steps + _drawn(given, context)).floor()
    # A scale that is not finite stands for its whole block.
    values = steps.nan_to_num(0).clamp(-MAX_VALUE, MAX_VALUE).to(torch.int8)
    return values, {"scale": scale}


def receive(
    values: Tensor, extras: Mapping[str, Tensor], context: FilterContext, *, block: int, **options: object
) -> Tensor:
    scale = extras["scale"].repeat_interleave(block, dim=1)[:, : context.size]
    return values.to(context.dtype) * scale


def _drawn(given: Tensor, context: FilterContext) -> Tensor:
    """Return random numbers from 0 to 1, (clients, size), for each client from its own generator."""
    import torch

    drawn = [
        torch.rand(context.size, dtype=given.dtype, generator=context.generator(client))
        for client in context.clients.tolist()
    ]
    return torch.stack(drawn).to(given.device)
