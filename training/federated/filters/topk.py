"""The largest numbers and their places; what is left out waits for later rounds (Stich et al., 2018, arXiv 1809.07599).

With error feedback, without which a biased choice need not come to the optimum (Karimireddy et al., 2019, arXiv
1901.09847): a client adds to its next update all that the server has not had of earlier ones, whatever later filters
made of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated

if TYPE_CHECKING:
    from torch import Tensor

    from training.federated.filter_chain import Passing

STAGE = "part"
RESIDUAL = "residual"


def begin(row: Tensor, *, feedback: bool, **options: object) -> Mapping[str, Tensor]:
    return {RESIDUAL: row.new_zeros(row.shape)} if feedback else {}


def send(
    given: Tensor,
    passing: Passing,
    *,
    density: Annotated[float, "0.00001..1", "The part of an update's numbers that is sent, with their places."] = 0.1,
    feedback: Annotated[bool, "What is left out is added to the client's next update."] = True,
) -> tuple[Tensor, Mapping[str, Tensor]]:
    whole = _with_residual(given, passing)
    places = _largest(whole, max(1, round(density * passing.numbers)))
    return whole.gather(1, places), {"places": places.int()}


def receive(values: Tensor, beside: Mapping[str, Tensor], passing: Passing, **options: object) -> Tensor:
    places = beside["places"].long()
    if (places[:, 0] < 0).any() or (places[:, -1] >= passing.numbers).any() or (places.diff() <= 0).any():
        raise ValueError(f"the places of the largest must ascend, from 0 to {passing.numbers - 1}")
    return values.new_zeros(len(values), passing.numbers).scatter_(1, places, values)


def keep(given: Tensor, received: Tensor, passing: Passing, **options: object) -> Mapping[str, Tensor]:
    return {name: _with_residual(given, passing) - received for name in passing.kept}


def _with_residual(given: Tensor, passing: Passing) -> Tensor:
    return given + passing.kept[RESIDUAL] if passing.kept else given


def _largest(whole: Tensor, count: int) -> Tensor:
    """(clients, count) places, ascending; of equal numbers the first ones, on any device.

    What is no number counts as the largest, so that the server sees it.
    """
    import torch

    size = whole.abs().nan_to_num(nan=float("inf"), posinf=float("inf"))
    least = size.topk(count, dim=1, sorted=False).values.amin(dim=1, keepdim=True)
    is_above, is_equal = size > least, size == least
    is_equal &= is_equal.cumsum(dim=1, dtype=torch.int32) <= count - is_above.sum(dim=1, keepdim=True)
    return (is_above | is_equal).nonzero()[:, 1].view(len(whole), count)
