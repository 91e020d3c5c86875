"""Power of choice: candidates with the highest loss; weights twice by samples (Cho et al., 2020, arXiv 2010.01243).

**It weights by samples twice**: candidates are drawn by their samples, and most algorithms weight their updates by
samples again. The paper draws by samples and takes the plain mean. `drawn_by = "equal"` draws all alike: samples
count once, in the mean.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Literal

import numpy as np
from numpy.typing import NDArray

from training.config.shape import Misfit

if TYPE_CHECKING:
    from training.federation.client_selection import SelectionContext
    from training.federation.config import FederationConfig

FENCE = 1.5
"""Distances between the quartiles, above the upper one (Tukey, 1977)."""


def select(
    context: SelectionContext,
    *,
    candidates: Annotated[
        int | None,
        "1..100000",
        "Candidates, of whom those with the highest loss take part; default: twice as many as take part.",
    ] = None,
    drawn_by: Annotated[
        Literal["samples", "equal"], "How candidates are drawn: by their samples, or all with equal probability."
    ] = "samples",
) -> NDArray[np.int64]:
    """Select by the loss of each client's last training, the paper's rpow-d, which costs no message.

    Clients that have never trained count as having the highest loss.
    """
    many = max(context.count, 2 * context.count if candidates is None else candidates)
    sizes = context.samples[context.eligible].astype(np.float64)
    drawn = context.rng.permutation(context.weighted(np.ones_like(sizes) if drawn_by == "equal" else sizes, many))
    losses = np.minimum(context.losses[drawn], _highest(context.losses))
    order = np.argsort(np.where(np.isnan(losses), -np.inf, -losses), kind="stable")
    return np.sort(drawn[order[: context.count]])


def _highest(losses: NDArray[np.float64]) -> float:
    """Return the upper bound of losses; clients that report more are drawn at random among each other.

    Clients report their losses themselves, and one that claims 1e30 would be selected for ever. The bound is Tukey's
    fence above the reported losses.
    """
    reported = losses[~np.isnan(losses)]
    if not len(reported):
        return np.inf
    # "lower": a reported loss, never a mean of an honest and a false one.
    low, high = np.quantile(reported, [0.25, 0.75], method="lower")
    return float(high + FENCE * (high - low))


def check(config: FederationConfig) -> Iterator[Misfit]:
    candidates = config.options_of("by_loss")["candidates"]
    if candidates is not None and not config.selected <= int(candidates) <= config.clients:
        nearest = min(max(int(candidates), config.selected), config.clients)
        yield Misfit(
            "by_loss.candidates",
            f"are {candidates}, of {config.clients} clients, {config.selected} of them in a round. Write {nearest}.",
        )
