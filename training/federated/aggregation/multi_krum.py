"""Multi-Krum: the mean of the updates nearest to their neighbours (Blanchard et al., 2017, arXiv 1703.02757)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated

from training.config.shape import Misfit
from training.federated.aggregation._robust import (
    complement,
    distances,
    expected_updates,
    krum_scores,
    require_updates,
    too_few_updates,
)

if TYPE_CHECKING:
    from torch import Tensor

    from training.federation.config import FederationConfig


def combine(
    rows: Tensor,
    weights: Tensor,
    *,
    f: Annotated[int, "0..50000", "Number of malicious clients in a round that it tolerates."] = 1,
    m: Annotated[int | None, "1..100000", "Updates that are averaged; default: all but f."] = None,
) -> tuple[Tensor, Sequence[int]]:
    """Return the mean of the selected updates, with equal weights, whatever number of samples clients report."""
    clients = len(rows)
    require_updates(rows, max(2 * f + 3, f + (m or 0)))
    chosen = sorted(krum_scores(distances(rows), f).argsort(stable=True)[: m or clients - f].tolist())
    return mean(rows, chosen), complement(chosen, clients)


def mean(rows: Tensor, places: Sequence[int]) -> Tensor:
    """Return the mean of these rows alone, (parameters,) float64: other rows may be infinite."""
    from training.federated import sums

    total = sums.zeros(rows.shape[1], rows.device)
    chosen = rows[list(places)]
    sums.add_weighted(total, chosen, total.new_ones(len(places)))
    return total / len(places)


def check(config: FederationConfig) -> Iterator[Misfit]:
    options = config.options_of("multi_krum")
    f, m = int(options["f"] or 0), options["m"]
    wrong = list(too_few_updates(config, "multi_krum.f", f, each=2, more=3))
    yield from wrong
    most = expected_updates(config) - f
    if not wrong and m is not None and int(m) > most:
        yield Misfit("multi_krum.m", f"is {m}, but of {most + f} updates a round {f} may be bad. Write at most {most}.")
