"""A count sketch: sums of numbers with signs, by chance (Charikar, Chen and Farach-Colton, 2002, ICALP).

In each row of the table every number is added, with its sign, to one column; which one and which sign follow from the
seed and the round, so that no place is unlucky for ever. Each row tells each number again, right on average, off by
about the norm of all of them over the root of the columns: it is for updates of which little is large.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Literal

from training.config.shape import Misfit

if TYPE_CHECKING:
    from torch import Tensor

    from training.federated.filter_chain import Passing
    from training.federation.config import FederationConfig

STAGE = "part"


def check(config: FederationConfig) -> Iterator[Misfit]:
    """A middle needs an odd number of rows."""
    options = config.options_of("sketch")
    if options["estimate"] == "median" and (rows := int(options["rows"] or 0)) % 2 == 0:
        message = f'is {rows}, of which none is in the middle. Write {rows - 1} or {rows + 1}, or estimate = "mean".'
        yield Misfit("sketch.rows", message)


def send(
    given: Tensor,
    passing: Passing,
    *,
    rows: Annotated[int, "1..31", "How often each number is told."] = 5,
    columns: Annotated[int, "2..100000000", "Sums in a row; rows times columns are sent."] = 256,
    estimate: Annotated[
        Literal["median", "mean"],
        "Of what the rows tell: median finds what is large among much that is small; mean is right on average.",
    ] = "median",
) -> tuple[Tensor, Mapping[str, Tensor]]:
    import torch

    told = []
    for row in range(rows):
        places, signs = _hashed(given, passing, row, columns)
        told.append(given.new_zeros(len(given), columns).index_add_(1, places, given * signs))
    return torch.cat(told, dim=1), {}


def receive(
    values: Tensor,
    beside: Mapping[str, Tensor],
    passing: Passing,
    *,
    rows: int,
    columns: int,
    estimate: str,
) -> Tensor:
    import torch

    told = []
    for row, sums in enumerate(torch.split(values, columns, dim=1)):
        places, signs = _hashed(values, passing, row, columns)
        told.append(sums.index_select(1, places) * signs)
    if estimate == "mean":
        return torch.stack(told).sum(dim=0) / rows
    return _middle(told)


def _middle(told: list[Tensor]) -> Tensor:
    """Of an odd number of them, place by place: bubbles rise until it is found, which is five times as fast as torch's
    median of so few. What is no number makes everything none that it meets."""
    import torch

    for risen in range(len(told) // 2 + 1):
        for low in range(len(told) - 1 - risen):
            one, other = told[low], told[low + 1]
            told[low], told[low + 1] = torch.minimum(one, other), torch.maximum(one, other)
    return told[len(told) // 2]


def _hashed(like: Tensor, passing: Passing, row: int, columns: int) -> tuple[Tensor, Tensor]:
    """(numbers,) columns, and (numbers,) signs: all clients' the same, so that sketches could be added up."""
    import torch

    generator = passing.generator(row)
    places = torch.randint(columns, (passing.numbers,), generator=generator)
    signs = torch.randint(2, (passing.numbers,), generator=generator) * 2 - 1
    return places.to(like.device), signs.to(like.device, like.dtype)
