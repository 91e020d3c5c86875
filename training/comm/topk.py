"""Each replica sends the largest gradients only and keeps the rest for later steps (Stich et al., arXiv 1809.07599)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from training.config.shape import Shape

if TYPE_CHECKING:
    from training.comm._exchange import Exchange, Peers

REMEMBERS = True
SENDS = "(n−1) · 8 · density · N"


def check(shape: Shape, **options: object) -> None:
    """Any number of replicas; but from 1/density on it sends more than plain does, which `communicated_mib` shows."""


def keeps(**options: object) -> int:
    """What is kept now, and was when the step began."""
    return 8


def exchange(
    peers: Peers,
    *,
    density: Annotated[
        float, "0.00001..1", "The part of each bucket's gradients that is sent, with its places."
    ] = 0.01,
) -> Exchange:
    from training.comm._sparse import Sparse

    return Sparse(peers, density)
