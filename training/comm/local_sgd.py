"""Replicas average their parameters after every few independent steps (local SGD; Stich, arXiv 1805.09767)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from training.config.shape import Shape

if TYPE_CHECKING:
    from training.comm._exchange import Exchange, Peers

ACCUMULATES_GRADIENTS = False
SENDS = "2(n−1)/n · 4N, every `every` steps"


def check(shape: Shape, **options: object) -> None:
    """Accept any number of replicas."""


def extra_bytes_per_parameter(**options: object) -> int:
    """Return the memory for the last common model."""
    return 4


def exchange(
    peers: Peers,
    *,
    every: Annotated[int, "1..1000000", "Steps between two averages; one more is taken after the last step."] = 8,
) -> Exchange:
    from training.comm._replicas import Replicas

    return Replicas(peers, every=every)
