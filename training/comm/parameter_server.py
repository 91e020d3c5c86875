"""Experimental: rank 0 has the model, others fetch it and send gradients asynchronously (SSP; Ho et al., NIPS 2013).

A worker may begin a step while no other is more than `staleness` steps behind. The server applies what it receives at
once, so results are not reproducible.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from training.config.shape import Misfit, Shape

if TYPE_CHECKING:
    from training.comm._exchange import Exchange, Peers
    from training.trainer import Trainer

ACCUMULATES_GRADIENTS = True
SENDS = "the server (n−1) · 4N, each worker 4N"


def check(shape: Shape, **options: object) -> None:
    if shape["dp"] < 2:
        raise Misfit("communication", "needs a server and at least one worker: 2 ranks or more. Or write plain.")


def exchange(
    peers: Peers,
    *,
    staleness: Annotated[int, "0..1000", "Maximum number of steps that a worker may be ahead of the slowest."] = 4,
) -> Exchange:
    from training.comm._server import ServedExchange

    return ServedExchange(peers, staleness)


def trainer() -> type[Trainer]:
    """Return its own training loop."""
    from training.parameter_server_trainer import ParameterServerTrainer

    return ParameterServerTrainer
