"""The largest coordinates and their indices; the others wait for later rounds (Stich et al., 2018, arXiv 1809.07599).

Error feedback adds what the server did not receive of earlier updates, after all filters, to the client's next one.
Without it a biased compression need not converge to the optimum (Karimireddy et al., 2019, arXiv 1901.09847).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated

if TYPE_CHECKING:
    from torch import Tensor

    from training.federated.filter_context import FilterContext

STAGE = "part"
RESIDUAL = "residual"


def begin(row: Tensor, *, feedback: bool, **options: object) -> Mapping[str, Tensor]:
    return {RESIDUAL: row.new_zeros(row.shape)} if feedback else {}


def send(
    given: Tensor,
    context: FilterContext,
    *,
    density: Annotated[float, "0.00001..1", "Share of an update's coordinates that is sent, with their indices."] = 0.1,
    feedback: Annotated[bool, "Whether what is left out is added to the client's next update."] = True,
) -> tuple[Tensor, Mapping[str, Tensor]]:
    whole = _with_residual(given, context)
    places = _largest(whole, max(1, round(density * context.size)))
    return whole.gather(1, places), {"places": places.int()}


def receive(values: Tensor, extras: Mapping[str, Tensor], context: FilterContext, **options: object) -> Tensor:
    places = extras["places"].long()
    if (places[:, 0] < 0).any() or (places[:, -1] >= context.size).any() or (places.diff() <= 0).any():
        raise ValueError(f"the indices of the largest must ascend, from 0 to {context.size - 1}")
    return values.new_zeros(len(values), context.size).scatter_(1, places, values)


def keep(given: Tensor, received: Tensor, context: FilterContext, **options: object) -> Mapping[str, Tensor]:
    return {name: _with_residual(given, context) - received for name in context.state}


def _with_residual(given: Tensor, context: FilterContext) -> Tensor:
    return given + context.state[RESIDUAL] if context.state else given


def _largest(whole: Tensor, count: int) -> Tensor:
    """Return the indices of the largest values, (clients, count), ascending; of equal ones the first, on any device.

    NaN and infinity count as the largest, so that the server sees them.
    """
    import torch

    size = whole.abs().nan_to_num(nan=float("inf"), posinf=float("inf"))
    least = size.topk(count, dim=1, sorted=False).values.amin(dim=1, keepdim=True)
    is_above, is_equal = size > least, size == least
    is_equal &= is_equal.cumsum(dim=1, dtype=torch.int32) <= count - is_above.sum(dim=1, keepdim=True)
    return (is_above | is_equal).nonzero()[:, 1].view(len(whole), count)
