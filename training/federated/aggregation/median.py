"""The median of every number by itself (Yin et al., 2018, arXiv 1803.01498)."""

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
    f: Annotated[int, "0..50000", "Bad clients among those of a round that it shall bear: fewer than half."] = 1,
) -> tuple[Tensor, Sequence[int]]:
    """Each counts one, whatever it says of its samples. Of an even number the mean of the two in the middle."""
    need(rows, 2 * f + 1)
    return trimmed(rows, (len(rows) - 1) // 2)


def check(config: FederationConfig) -> Iterator[Misfit]:
    f = int(config.options_of("median")["f"] or 0)
    yield from misfits(config, "median.f", f, each=2, more=1)
