"""Each replica sends the largest gradients only and keeps the rest for later steps (Stich et al., arXiv 1809.07599)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from training.config.shape import Shape

if TYPE_CHECKING:
    from training.comm._exchange import Exchange, Peers

ACCUMULATES_GRADIENTS = True
SENDS = "(n−1) · 8 · density · N"


def check(shape: Shape, **options: object) -> None:
    """Accept any number of replicas.

    From 1/density on it sends more than plain does, which `communicated_mib` shows.
    """


def extra_bytes_per_parameter(**options: object) -> int:
    """Return the memory for what is not sent yet, now and at the beginning of the step."""
    return 8


def exchange(
    peers: Peers,
    *,
    density: Annotated[
        float, "0.00001..1", "Fraction of each bucket's gradients that is sent, with their positions."
    ] = 0.01,
) -> Exchange:
    from training.comm._sparse import SparseExchange

    return SparseExchange(peers, density)
