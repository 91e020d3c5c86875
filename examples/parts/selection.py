"""A selection that prefers clients which were not asked for long, and draws the rest by lot."""

import numpy as np


def select(round, *, newest=1):
    """Return the numbers of the clients that take part, ascending.

    `newest`: of a round's clients so many are drawn from all; the others are those that have waited longest.
    """
    order = round.draw.permutation(round.eligible)  # by lot among those that have waited as long
    waited = order[np.argsort(round.last_rounds[order], kind="stable")]
    many = max(0, round.count - newest)
    chosen, rest = waited[:many], waited[many:]
    return np.sort(np.concatenate([chosen, round.draw.permutation(rest)[: round.count - many]]))
