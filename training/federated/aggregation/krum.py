"""Krum: selects the one update that is nearest to its neighbours (Blanchard et al., 2017, arXiv 1703.02757)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated

from training.config.shape import Misfit
from training.federated.aggregation._robust import complement, distances, krum_scores, require_updates, too_few_updates

if TYPE_CHECKING:
    from torch import Tensor

    from training.federation.config import FederationConfig


def combine(
    rows: Tensor,
    weights: Tensor,
    *,
    f: Annotated[int, "0..50000", "Number of malicious clients in a round that it tolerates."] = 1,
) -> tuple[Tensor, Sequence[int]]:
    """Return the selected update; the first of equal ones. All others are rejected, so it learns slowly."""
    require_updates(rows, 2 * f + 3)
    best = int(krum_scores(distances(rows), f).argmin())
    return rows[best].double(), complement([best], len(rows))


def check(config: FederationConfig) -> Iterator[Misfit]:
    f = int(config.options_of("krum")["f"] or 0)
    yield from too_few_updates(config, "krum.f", f, each=2, more=3)
