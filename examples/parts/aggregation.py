"""A rule that sees each update: none may be much longer than the others, then the mean without the extremes."""

import torch

from training.federation.parts import TooFewUpdates


def combine(rows, weights, *, trim=1, longest=2.0):
    """Return the combined row, and the places of the rows that were left out.

    rows: (clients, numbers), of the clients in ascending order, all of them finite; weights: (clients,) float64.
    `trim`: values cut off at each end, of each number; `longest`: how many times the median length a row may have.
    """
    if len(rows) <= 2 * trim:
        # The round is tried again with other clients.
        raise TooFewUpdates(f"{len(rows)} updates are too few to cut off {trim} at each end")
    rows = rows.double()
    lengths = rows.norm(dim=1)
    most = longest * lengths.median()
    clipped = rows * torch.clamp(most / lengths.clamp(min=1e-12), max=1.0)[:, None]
    ordered = clipped.sort(dim=0).values
    # Shortening leaves nobody out. A rule that drops whole rows returns their places here, and the page calls their
    # clients rejected.
    return ordered[trim : len(rows) - trim].mean(dim=0), []
