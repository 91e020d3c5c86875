"""The mean of every number without its lowest and highest values (Yin et al., 2018, arXiv 1803.01498)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated

from training.config.shape import Misfit
from training.federated.aggregation._robust import misfits, need, trimmed

if TYPE_CHECKING:
    from torch import Tensor

    from training.federation.config import FederationConfig


def combine(
    rows: Tensor,
    weights: Tensor,
    *,
    trim: Annotated[
        int, "0..50000", "Values that are cut off at each end, of each number: as many bad clients it bears."
    ] = 1,
) -> tuple[Tensor, Sequence[int]]:
    """Each counts one, whatever it says of its samples."""
    need(rows, 2 * trim + 1)
    return trimmed(rows, trim)


def check(config: FederationConfig) -> Iterator[Misfit]:
    trim = int(config.options_of("trimmed_mean")["trim"] or 0)
    yield from misfits(config, "trimmed_mean.trim", trim, each=2, more=1)
