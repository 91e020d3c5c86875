"""Krum: the one update that is nearest to its neighbours (Blanchard et al., 2017, arXiv 1703.02757)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated

from training.config.shape import Misfit
from training.federated.aggregation._robust import but, distances, krum_scores, misfits, need

if TYPE_CHECKING:
    from torch import Tensor

    from training.federation.config import FederationConfig


def combine(
    rows: Tensor,
    weights: Tensor,
    *,
    f: Annotated[int, "0..50000", "Bad clients among those of a round that it shall bear."] = 1,
) -> tuple[Tensor, Sequence[int]]:
    """All but one are left out, so it learns slowly; of equals the first is taken."""
    need(rows, 2 * f + 3)
    best = int(krum_scores(distances(rows), f).argmin())
    return rows[best].double(), but([best], len(rows))


def check(config: FederationConfig) -> Iterator[Misfit]:
    f = int(config.options_of("krum")["f"] or 0)
    yield from misfits(config, "krum.f", f, each=2, more=3)
