"""Whole numbers of samples by parts of one."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def shared_out(samples: int, parts: NDArray[np.float64], *, at_least: int = 0) -> NDArray[np.int64]:
    """(samples,) ascending owners, of each about its part of all; `at_least` so many, where there are enough."""
    return np.repeat(np.arange(len(parts)), counts_of(samples, parts, at_least=at_least))


def counts_of(samples: int, parts: NDArray[np.float64], *, at_least: int = 0) -> NDArray[np.int64]:
    """Return how many samples each has, (parts,), whose sum is `samples`.

    By largest remainders, ties to the first: whoever rounds each part alone loses or invents samples.
    """
    at_least = min(at_least, samples // max(1, len(parts)))
    exact = parts * (samples - at_least * len(parts))
    counts = np.floor(exact).astype(np.int64)
    missing = samples - at_least * len(parts) - int(counts.sum())
    counts[np.argsort(-(exact - counts), kind="stable")[:missing]] += 1
    return counts + at_least
