"""Norm clipping: the mean of updates of bounded length (Sun et al., 2019, arXiv 1911.07963)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

from training.federated.aggregation._robust import blocks

if TYPE_CHECKING:
    from torch import Tensor


def combine(
    rows: Tensor,
    weights: Tensor,
    *,
    norm: Annotated[float | None, "1e-9..1e9", "Maximum length of an update; default: the round's median."] = None,
) -> tuple[Tensor, Sequence[int]]:
    """Shorten longer updates, reject none, and return the mean, weighted as the algorithm says."""
    import torch

    from training.federated import sums

    lengths = norms(rows)
    most = lengths.quantile(0.5) if norm is None else torch.full_like(lengths[0], norm)
    factors = torch.where(lengths > most, most / lengths, 1.0)
    total = sums.zeros(rows.shape[1], rows.device)
    sums.add_weighted(total, rows, weights * factors)
    return total / weights.sum(), ()


def norms(rows: Tensor) -> Tensor:
    """Return the length of each row, (clients,) float64."""
    return sum(
        (block.square().sum(dim=1) for _, block in blocks(rows)), start=rows.new_zeros(len(rows)).double()
    ).sqrt()
