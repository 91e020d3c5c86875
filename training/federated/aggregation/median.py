"""Coordinate-wise median (Yin et al., 2018, arXiv 1803.01498)."""

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
    f: Annotated[int, "0..50000", "Number of malicious clients in a round that it tolerates; fewer than half."] = 1,
) -> tuple[Tensor, Sequence[int]]:
    """Return the median of each coordinate; of an even number of updates the mean of the two in the middle.

    Clients have equal weight, whatever number of samples they report.
    """
    require_updates(rows, 2 * f + 1)
    return trimmed_mean(rows, (len(rows) - 1) // 2)


def check(config: FederationConfig) -> Iterator[Misfit]:
    f = int(config.options_of("median")["f"] or 0)
    yield from too_few_updates(config, "median.f", f, each=2, more=1)
