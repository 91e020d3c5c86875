"""A count sketch: random signed sums of coordinates (Charikar, Chen and Farach-Colton, 2002, ICALP).

In each row of the table every coordinate is added, with a sign, to one column. Columns and signs follow from the seed
and the round, so that no coordinate has collisions for ever. Each row estimates each coordinate without bias, with an
error of about the norm of the update over the root of the columns: it is for updates with few large coordinates.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Literal

from training.config.shape import Misfit

if TYPE_CHECKING:
    from torch import Tensor

    from training.federated.filter_context import FilterContext
    from training.federation.config import FederationConfig

STAGE = "part"


def check(config: FederationConfig) -> Iterator[Misfit]:
    """Yield an even number of rows, which has no middle."""
    options = config.options_of("sketch")
    if options["estimate"] == "median" and (rows := int(options["rows"] or 0)) % 2 == 0:
        message = f'is {rows}, of which none is in the middle. Write {rows - 1} or {rows + 1}, or estimate = "mean".'
        yield Misfit("sketch.rows", message)


def send(
    given: Tensor,
    context: FilterContext,
    *,
    rows: Annotated[int, "1..31", "Rows of the table: estimates of each coordinate."] = 5,
    columns: Annotated[int, "2..100000000", "Columns of the table; rows times columns sums are sent."] = 256,
    estimate: Annotated[
        Literal["median", "mean"],
        "How rows are combined: median finds large coordinates among many small ones; mean is unbiased.",
    ] = "median",
) -> tuple[Tensor, Mapping[str, Tensor]]:
    import torch

    estimates = []
    for row in range(rows):
        places, signs = _hashed(given, context, row, columns)
        estimates.append(given.new_zeros(len(given), columns).index_add_(1, places, given * signs))
    return torch.cat(estimates, dim=1), {}


def receive(
    values: Tensor,
    extras: Mapping[str, Tensor],
    context: FilterContext,
    *,
    rows: int,
    columns: int,
    estimate: str,
) -> Tensor:
    import torch

    estimates = []
    for row, sums in enumerate(torch.split(values, columns, dim=1)):
        places, signs = _hashed(values, context, row, columns)
        estimates.append(sums.index_select(1, places) * signs)
    if estimate == "mean":
        return torch.stack(estimates).sum(dim=0) / rows
    return _middle(estimates)


def _middle(estimates: list[Tensor]) -> Tensor:
    """Return the median of an odd number of tensors, element by element.

    Partial bubble sort is five times as fast as torch's median of so few. NaN spreads to all elements that it meets.
    """
    import torch

    for risen in range(len(estimates) // 2 + 1):
        for low in range(len(estimates) - 1 - risen):
            lower, upper = estimates[low], estimates[low + 1]
            estimates[low], estimates[low + 1] = torch.minimum(lower, upper), torch.maximum(lower, upper)
    return estimates[len(estimates) // 2]


def _hashed(like: Tensor, context: FilterContext, row: int, columns: int) -> tuple[Tensor, Tensor]:
    """Return the columns and signs of all coordinates, (size,) each.

    They are equal for all clients, so that sketches can be added.
    """
    import torch

    generator = context.generator(row)
    places = torch.randint(columns, (context.size,), generator=generator)
    signs = torch.randint(2, (context.size,), generator=generator) * 2 - 1
    return places.to(like.device), signs.to(like.device, like.dtype)
