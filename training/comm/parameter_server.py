"""Experimental: rank 0 keeps the model, the others fetch it and send gradients, unawaited (SSP; Ho et al., NIPS 2013).

A worker may begin a step while no other is more than `staleness` steps behind. What the server receives it applies at
once, so nothing repeats bit for bit.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from training.config.shape import Misfit, Shape

if TYPE_CHECKING:
    from training.comm._exchange import Exchange, Peers
    from training.trainer import Trainer

REMEMBERS = True
SENDS = "the server (n−1) · 4N, each worker 4N"


def check(shape: Shape, **options: object) -> None:
    if shape["dp"] < 2:
        raise Misfit("communication", "needs a rank that serves and one that trains: 2 ranks or more. Or write plain.")


def exchange(
    peers: Peers,
    *,
    staleness: Annotated[int, "0..1000", "Most steps that a worker may be ahead of the slowest."] = 4,
) -> Exchange:
    from training.comm._served import Served

    return Served(peers, staleness)


def trainer() -> type[Trainer]:
    """Its own loop."""
    from training.server_trainer import ServedTrainer

    return ServedTrainer
