"""Gossip: no server; clients mix their models with those of neighbours (Lian et al., 2017, arXiv 1705.09056).

D-PSGD in the second order that the paper allows: X ← (X - η G) W, one column for each client, W symmetric with rows and
columns that sum to 1. No client has the mean of all models; it is computed for evaluation alone.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Literal

from training.config.shape import Misfit

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor, nn

    from training.federated.client import Client
    from training.federated.controller import Controller
    from training.federation.config import FederationConfig

SENT: Mapping[str, str] = {}
PACES = ("rounds",)
EVALUATES_SERVER_MODEL = True
MODEL = "model"
MAX_CLIENTS = 4000
"""Clients at most: the mixing matrix has their number squared."""
BLOCK = 2**21
"""Values that are converted to float64 at a time: 16 MB, where all models at once would take twice their memory."""


def check(config: FederationConfig) -> Iterator[Misfit]:
    """Yield settings that leave clients out, or change what neighbours exchange."""
    options, clients = config.options_of("gossip"), config.clients
    topology, degree = options["topology"], options["degree"]
    if not 2 <= clients <= MAX_CLIENTS:
        yield Misfit("clients", f"are {clients:,}, but gossip is for 2 to {MAX_CLIENTS:,}.")
    elif topology == "torus" and _rows(clients) == 1 and clients > 3:
        yield Misfit("clients", f"are {clients:,}, which make no grid of rows and columns. Write {clients + 1:,}.")
    elif topology == "random" and (degree % 2 or degree >= clients):  # type: ignore[operator]
        most = max(2, (clients - 1) // 2 * 2)
        yield Misfit("gossip.degree", f"is {degree}, but must be even and below the number of clients: 2 to {most}.")
    if config.selected != clients:
        yield Misfit("per_round", "is for some of the clients, but in gossip all take part. Leave it out.")
    if config.aggregation != "mean":
        yield Misfit("aggregation", f'is "{config.aggregation}", but gossip has no server to aggregate. Write "mean".')
    if config.filters:
        yield Misfit("filters", "are between clients and a server, and gossip has none. Leave them out.")


def initial_client_state(model: Tensor, **options: object) -> Mapping[str, Tensor]:
    return {MODEL: model}


def personal(model: nn.Module, **options: object) -> Collection[str]:
    """Return the names of the running statistics, which stay with each client."""
    return [name for name, _ in model.named_buffers()]


def personalized_model(model: Tensor, state: Mapping[str, Tensor], **options: object) -> Tensor:
    return state[MODEL]


def train(client: Client, **options: object) -> Mapping[str, Tensor]:
    client.state[MODEL] = client.descend(begin=client.state[MODEL])
    return {}


def run_round(
    controller: Controller,
    *,
    topology: Annotated[
        Literal["ring", "torus", "complete", "random"],
        "Neighbours of a client: ring: two; torus: four on a grid with joined edges; complete: all; random: `degree` "
        "others, drawn in each round.",
    ] = "ring",
    degree: Annotated[int, "2..1000", "Neighbours of each client in a random topology; an even number."] = 4,
) -> Tensor:
    import numpy as np
    import torch

    from training.federated.messages import Traffic
    from training.federated.model import STATISTICS

    controller.train()
    server = controller.server
    neighbours = adjacency_matrix(topology, server.clients, degree, controller.rng())
    matrix = torch.from_numpy(mixing_matrix(neighbours)).to(server.client_state[MODEL].device)
    models = mix_models(server.client_state.whole(MODEL), matrix)
    home = server.client_state.home
    server.client_state[MODEL] = models[home.start : home.stop].clone() if len(home) < len(models) else models
    if STATISTICS in server.client_state:
        server.statistics.copy_(server.client_state.whole(STATISTICS).double().mean(dim=0))
    # Each client sends its model to each neighbour; no server sends any.
    sent = neighbours.sum(axis=1).astype(np.int64) * controller.model_bytes
    controller.costs.traffic = Traffic(np.arange(server.clients), sent, np.zeros_like(sent))
    return torch.cat([block.double().mean(dim=0) for block in _blocks(models)])


def mix_models(models: Tensor, matrix: Tensor) -> Tensor:
    """Return each client's next model (clients, parameters), in float64 a block of columns at a time."""
    import torch

    found = torch.empty_like(models)
    for old, new in zip(_blocks(models), _blocks(found), strict=True):
        new.copy_(matrix @ old.double())
    return found


def _blocks(models: Tensor) -> Sequence[Tensor]:
    import torch

    return torch.split(models, max(1, BLOCK // max(1, len(models))), dim=1)


def mixing_matrix(neighbours: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the mixing matrix (clients, clients): equal shares of a client's own model and of each neighbour's."""
    import numpy as np

    chosen = neighbours + np.eye(len(neighbours))
    found: NDArray[np.float64] = chosen / chosen.sum(axis=1, keepdims=True)
    return found


def adjacency_matrix(topology: str, clients: int, degree: int, rng: np.random.RandomState) -> NDArray[np.float64]:
    """Return the adjacency matrix (clients, clients): 1 for neighbours, 0 elsewhere and on the diagonal."""
    import numpy as np

    if topology == "complete":
        return _ring_adjacency(clients, clients // 2)
    if topology == "torus":
        rows = _rows(clients)
        columns = clients // rows
        within_rows = np.kron(np.eye(rows), _ring_adjacency(columns, 1))
        within_columns = np.kron(_ring_adjacency(rows, 1), np.eye(columns))
        both: NDArray[np.float64] = within_rows + within_columns
        return both
    if topology == "random":
        places = rng.permutation(clients)
        return _ring_adjacency(clients, degree // 2)[places][:, places]
    return _ring_adjacency(clients, 1)


def _ring_adjacency(places: int, reach: int) -> NDArray[np.float64]:
    """Return the adjacency matrix of a ring whose places at most `reach` apart are neighbours."""
    import numpy as np

    apart = np.abs(np.subtract.outer(np.arange(places), np.arange(places)))
    nearest = np.minimum(apart, places - apart)
    found: NDArray[np.float64] = ((nearest > 0) & (nearest <= reach)).astype(np.float64)
    return found


def _rows(clients: int) -> int:
    """Return the rows of the grid that is nearest to a square."""
    return next(rows for rows in range(math.isqrt(clients), 0, -1) if clients % rows == 0)
