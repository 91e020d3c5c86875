"""Replicas train alone for many steps; an outer optimizer steps along their mean movement (DiLoCo, arXiv 2311.08105).

Douillard et al., 2023: the inner optimizer is the run's own, AdamW; the outer one is SGD with Nesterov's momentum.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from training.config.shape import Shape

if TYPE_CHECKING:
    from training.comm._exchange import Exchange, Peers

ACCUMULATES_GRADIENTS = False
SENDS = "2(n−1)/n · 4N, every `every` steps"


def check(shape: Shape, **options: object) -> None:
    """Accept any number of replicas; a single one takes the outer steps along its own movement."""


def extra_bytes_per_parameter(*, outer_momentum: float = 0.9, **options: object) -> int:
    """Return the memory for the last common model and the outer optimizer's velocity."""
    return 8 if outer_momentum else 4


def exchange(
    peers: Peers,
    *,
    every: Annotated[int, "1..1000000", "Steps between two outer steps; one more is taken after the last step."] = 100,
    outer_learning_rate: Annotated[
        float, "0.000001..10", "Learning rate of the outer optimizer, along the replicas' mean movement."
    ] = 0.7,
    outer_momentum: Annotated[float, "0..0.999", "Nesterov momentum of the outer optimizer; 0: plain SGD."] = 0.9,
) -> Exchange:
    from training.comm._replicas import Replicas

    return Replicas(peers, every=every, learning_rate=outer_learning_rate, momentum=outer_momentum)
