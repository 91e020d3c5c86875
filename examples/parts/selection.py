"""Select the clients that have waited longest, and draw the rest at random."""

import numpy as np


def select(round, *, newest=1):
    """Return the ids of the clients that take part, ascending.

    `newest`: how many of them are drawn from all clients; the others are those that have waited longest.
    """
    order = round.rng.permutation(round.eligible)  # at random among those that have waited equally long
    waited = order[np.argsort(round.last_rounds[order], kind="stable")]
    many = max(0, round.count - newest)
    chosen, rest = waited[:many], waited[many:]
    return np.sort(np.concatenate([chosen, round.rng.permutation(rest)[: round.count - many]]))
