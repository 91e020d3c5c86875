"""Coordinate-wise mean without the lowest and highest values (Yin et al., 2018, arXiv 1803.01498)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated

from training.config.shape import Misfit
from training.federated.aggregation._robust import require_updates, too_few_updates, trimmed_mean

if TYPE_CHECKING:
    from torch import Tensor

    from training.federation.config import FederationConfig


def combine(
    rows: Tensor,
    weights: Tensor,
    *,
    trim: Annotated[
        int, "0..50000", "Values that are cut off at each end of each coordinate: so many bad clients it tolerates."
    ] = 1,
) -> tuple[Tensor, Sequence[int]]:
    """Return the trimmed mean of each coordinate, with equal weights, whatever number of samples clients report."""
    require_updates(rows, 2 * trim + 1)
    return trimmed_mean(rows, trim)


def check(config: FederationConfig) -> Iterator[Misfit]:
    trim = int(config.options_of("trimmed_mean")["trim"] or 0)
    yield from too_few_updates(config, "trimmed_mean.trim", trim, each=2, more=1)
