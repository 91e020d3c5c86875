"""Multi-Krum: the mean of those nearest to their neighbours (Blanchard et al., 2017, arXiv 1703.02757)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated

from training.config.shape import Misfit
from training.federated.aggregation._robust import but, distances, krum_scores, misfits, need, waited_for

if TYPE_CHECKING:
    from torch import Tensor

    from training.federation.config import FederationConfig


def combine(
    rows: Tensor,
    weights: Tensor,
    *,
    f: Annotated[int, "0..50000", "Bad clients among those of a round that it shall bear."] = 1,
    m: Annotated[int | None, "1..100000", "Updates that are kept; left out: all but f."] = None,
) -> tuple[Tensor, Sequence[int]]:
    """Each that is kept counts one, whatever it says of its samples."""
    clients = len(rows)
    need(rows, max(2 * f + 3, f + (m or 0)))
    kept = sorted(krum_scores(distances(rows), f).argsort(stable=True)[: m or clients - f].tolist())
    return mean(rows, kept), but(kept, clients)


def mean(rows: Tensor, kept: Sequence[int]) -> Tensor:
    """(numbers,) float64, of these rows alone: what is left out may be infinite."""
    from training.federated import sums

    total = sums.zeros(rows.shape[1], rows.device)
    chosen = rows[list(kept)]
    sums.add_weighted(total, chosen, total.new_ones(len(kept)))
    return total / len(kept)


def check(config: FederationConfig) -> Iterator[Misfit]:
    options = config.options_of("multi_krum")
    f, m = int(options["f"] or 0), options["m"]
    wrong = list(misfits(config, "multi_krum.f", f, each=2, more=3))
    yield from wrong
    most = waited_for(config) - f
    if not wrong and m is not None and int(m) > most:
        yield Misfit("multi_krum.m", f"is {m}, but of {most + f} updates a round {f} may be bad. Write at most {most}.")
