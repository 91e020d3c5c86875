"""Split by labels: each client has samples of a few labels only, about equally many as other clients with them."""

import numpy as np


def divide(labels, clients, rng, *, labels_each=2):
    """Return the client of each training sample: (samples,) integers from 0 to clients - 1.

    `labels.by_split["train"]` (samples,): the label of each sample. `rng`: a numpy RandomState, seeded by the run.
    """
    of = labels.by_split["train"]
    names = np.unique(of)
    order = rng.permutation(len(names))
    owners = np.empty(len(of), dtype=np.int64)
    # Client 0 has the first labels_each of the shuffled labels, client 1 the next ones, and so on in a circle.
    firsts = labels_each * np.arange(clients)
    has = [{int(order[(first + i) % len(names)]) for i in range(labels_each)} for first in firsts]
    for place, name in enumerate(names):
        holders = [client for client in range(clients) if place in has[client]] or [place % clients]
        rows = rng.permutation(np.flatnonzero(of == name))
        owners[rows] = np.resize(holders, len(rows))
    return owners
