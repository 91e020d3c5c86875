"""A robust rule: bound the length of each update, then take the mean without the extremes of each coordinate."""

import torch

from training.federation.parts import TooFewUpdates


def combine(rows, weights, *, trim=1, longest=2.0):
    """Return the combined row, and the places of the rows that were left out.

    rows: (clients, parameters), in ascending order of clients, all finite; weights: (clients,) float64.
    `trim`: values cut off at each end of each coordinate; `longest`: maximum length of a row, in median lengths.
    """
    if len(rows) <= 2 * trim:
        # The round is tried again with other clients.
        raise TooFewUpdates(f"{len(rows)} updates are too few to cut off {trim} at each end")
    rows = rows.double()
    lengths = rows.norm(dim=1)
    most = longest * lengths.median()
    clipped = rows * torch.clamp(most / lengths.clamp(min=1e-12), max=1.0)[:, None]
    ordered = clipped.sort(dim=0).values
    # Shortening rejects no client. A rule that drops whole rows returns their places here, and the page reports their
    # clients as rejected.
    return ordered[trim : len(rows) - trim].mean(dim=0), []
