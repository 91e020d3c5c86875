"""Numbers of 8 bits, with a scale for each block of them (after QSGD, Alistarh et al., 2017, arXiv 1610.02132).

Stochastic rounding is right on average. The nearest is closer, at most half a step off, but loses for good whatever
never gets to half a step of its block's largest, unless a filter before it sends that later: topk and delta do. So the
former is the default, and the latter for those two.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Literal

if TYPE_CHECKING:
    from torch import Tensor

    from training.federated.filter_chain import Passing

STAGE = "width"
LARGEST = 127


def send(
    given: Tensor,
    passing: Passing,
    *,
    block: Annotated[int, "1..1048576", "Numbers that share a scale, the largest of them by 127."] = 256,
    rounding: Annotated[
        Literal["stochastic", "nearest"],
        "stochastic: up or down by chance, from the seed, the round and the client, right on average; nearest: closer, "
        "for filters before it that send later what is lost.",
    ] = "stochastic",
) -> tuple[Tensor, Mapping[str, Tensor]]:
    import torch
    from torch.nn.functional import pad

    blocks = pad(given, (0, -passing.numbers % block)).view(len(given), -1, block)
    scale = blocks.abs().amax(dim=2) / LARGEST
    steps = (blocks / torch.where(scale == 0, 1, scale)[..., None]).flatten(1)[:, : passing.numbers]
    steps = steps.round() if rounding == "nearest" else (steps + _drawn(given, passing)).floor()
    # A scale that is no number says so for its whole block.
    values = steps.nan_to_num(0).clamp(-LARGEST, LARGEST).to(torch.int8)
    return values, {"scale": scale}


def receive(values: Tensor, beside: Mapping[str, Tensor], passing: Passing, *, block: int, **options: object) -> Tensor:
    scale = beside["scale"].repeat_interleave(block, dim=1)[:, : passing.numbers]
    return values.to(passing.dtype) * scale


def _drawn(given: Tensor, passing: Passing) -> Tensor:
    """(clients, numbers) from 0 to 1: of each client its own, whoever is beside it."""
    import torch

    drawn = [
        torch.rand(passing.numbers, dtype=given.dtype, generator=passing.generator(client))
        for client in passing.clients.tolist()
    ]
    return torch.stack(drawn).to(given.device)
