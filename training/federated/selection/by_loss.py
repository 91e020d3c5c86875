"""Power of choice: of some candidates those with the highest loss; weighs twice (Cho et al., 2020, arXiv 2010.01243).

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
    from training.federation.client_selection import Asked
    from training.federation.config import FederationConfig

FENCE = 1.5
"""Distances between the quartiles, above the upper one (Tukey, 1977)."""


def select(
    asked: Asked,
    *,
    candidates: Annotated[
        int | None,
        "1..100000",
        "Of whom those with the highest loss take part; left out: twice as many as are asked in a round.",
    ] = None,
    drawn_by: Annotated[
        Literal["samples", "equal"], "What candidates are drawn by; equal: each as likely as any other."
    ] = "samples",
) -> NDArray[np.int64]:
    """The paper's rpow-d: by the loss of a client's last training, which costs no message. None yet: the highest."""
    many = max(asked.count, 2 * asked.count if candidates is None else candidates)
    sizes = asked.samples[asked.eligible].astype(np.float64)
    drawn = asked.draw.permutation(asked.weighted(np.ones_like(sizes) if drawn_by == "equal" else sizes, many))
    losses = np.minimum(asked.losses[drawn], _highest(asked.losses))
    order = np.argsort(np.where(np.isnan(losses), -np.inf, -losses), kind="stable")
    return np.sort(drawn[order[: asked.count]])


def _highest(losses: NDArray[np.float64]) -> float:
    """Return the largest loss that counts: whoever reports more is drawn by lot among those that do.

    A loss is the client's own word, and one that claims 1e30 would come before everybody else for ever. The bound is
    Tukey's fence above the losses that are known.
    """
    known = losses[~np.isnan(losses)]
    if not len(known):
        return np.inf
    low, high = np.quantile(known, [0.25, 0.75], method="lower")  # never between an honest one and a liar
    return float(high + FENCE * (high - low))


def check(config: FederationConfig) -> Iterator[Misfit]:
    candidates = config.options_of("by_loss")["candidates"]
    if candidates is not None and not config.selected <= int(candidates) <= config.clients:
        nearest = min(max(int(candidates), config.selected), config.clients)
        yield Misfit(
            "by_loss.candidates",
            f"are {candidates}, of {config.clients} clients, {config.selected} of them in a round. Write {nearest}.",
        )
