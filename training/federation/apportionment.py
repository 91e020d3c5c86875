"""Apportion whole numbers of samples by shares."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def apportioned_owners(samples: int, parts: NDArray[np.float64], *, at_least: int = 0) -> NDArray[np.int64]:
    """Return the owner of each sample (samples,), ascending, by the shares `parts`, which sum to 1.

    Each has `at_least` that many samples, if there are enough.
    """
    return np.repeat(np.arange(len(parts)), apportion(samples, parts, at_least=at_least))


def apportion(samples: int, parts: NDArray[np.float64], *, at_least: int = 0) -> NDArray[np.int64]:
    """Return how many samples each has, (parts,), which sum to `samples`.

    By the largest remainders, ties to the first: rounding each share by itself would lose or invent samples.
    """
    at_least = min(at_least, samples // max(1, len(parts)))
    exact = parts * (samples - at_least * len(parts))
    counts = np.floor(exact).astype(np.int64)
    missing = samples - at_least * len(parts) - int(counts.sum())
    counts[np.argsort(-(exact - counts), kind="stable")[:missing]] += 1
    return counts + at_least
