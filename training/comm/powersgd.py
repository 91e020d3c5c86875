"""Each gradient matrix is sent as two thin ones, with error feedback (PowerSGD; Vogels et al., arXiv 1905.13727)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from training.config.shape import Shape

if TYPE_CHECKING:
    from training.comm._exchange import Exchange, Peers

ACCUMULATES_GRADIENTS = True
SENDS = "2(n−1)/n · 4 · rank · Σ(rows + columns), and 4 for each number of what is not compressed"


def check(shape: Shape, **options: object) -> None:
    """Accept any number of replicas, on any backend: all gradients are in one bucket, see `_low_rank`."""


def extra_bytes_per_parameter(**options: object) -> int:
    """Return the memory for what is not sent yet, now and at the beginning of the step."""
    return 8


def exchange(
    peers: Peers,
    *,
    rank: Annotated[int, "1..64", "Rank of the thin matrices; twice the rank, twice the bytes."] = 4,
    plain_steps: Annotated[
        int, "0..", "Uncompressed steps at the start of a run; the first gradients matter most."
    ] = 10,
) -> Exchange:
    from training.comm._low_rank import LowRank

    return LowRank(peers, rank, plain_steps)
