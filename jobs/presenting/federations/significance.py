"""Judge whether two runs differ by more than chance, from their evaluation samples and the scatter of rounds. Pure."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

DEVIATIONS = 2.0
"""Standard deviations of the difference that count as chance: covers about 95 % of differences between two seeds."""
EVALUATIONS = 10
"""Number of newest evaluations from which the scatter is estimated; earlier ones are of a different model."""
MIN_EVALUATIONS = 5
"""Fewer leave at most two second differences, too few to estimate a scatter."""


def chance_margin(
    values: tuple[float, float],
    evaluation_samples: tuple[float | None, float | None],
    ends: tuple[NDArray[np.float64], ...],
) -> float:
    """Return by how much two runs may differ by chance.

    `evaluation_samples` is the sample size of each accuracy; None for a loss, or if unknown. `ends` are the newest
    evaluations of each run.
    """
    middle = sum(values) / len(values)
    variances = [
        max(_sampling(middle, many), _scatter(end)) for many, end in zip(evaluation_samples, ends, strict=True)
    ]
    return DEVIATIONS * math.sqrt(sum(variances))


def _sampling(share: float, many: float | None) -> float:
    """Return the variance of a proportion over this many samples.

    0 if it is not a proportion or the number is unknown.
    """
    return share * (1 - share) / many if many and 0 < share < 1 else 0.0


def _scatter(values: NDArray[np.float64]) -> float:
    """Return the variance about a straight line, so that a run that is still improving does not count as noisy."""
    newest = values[-EVALUATIONS:]
    return float(np.square(np.diff(newest, n=2)).mean()) / 6 if len(newest) >= MIN_EVALUATIONS else 0.0
