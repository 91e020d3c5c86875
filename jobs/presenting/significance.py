"""Judge whether two runs differ by more than chance: by the evaluation samples and the scatter of rounds. Pure."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

DEVIATIONS = 2.0
"""Standard deviations of the difference that count as chance: about 95 % of what two seeds of one set-up differ by."""
EVALUATIONS = 10
"""The newest evaluations from which the scatter is estimated: of earlier ones the model was another."""
FEWEST = 5
"""Evaluations. Fewer leave at most two second differences, which say nothing of a scatter."""


def chance_margin(
    values: tuple[float, float], held_out: tuple[float | None, float | None], ends: tuple[NDArray[np.float64], ...]
) -> float:
    """Return by how much two runs may differ by chance.

    `held_out`: samples that each value is the accuracy over; None for a loss, or where nobody knows. `ends`: the newest
    evaluations of each run.
    """
    middle = sum(values) / len(values)
    variances = [max(_sampling(middle, many), _scatter(end)) for many, end in zip(held_out, ends, strict=True)]
    return DEVIATIONS * math.sqrt(sum(variances))


def _sampling(share: float, many: float | None) -> float:
    """Return the variance of a proportion over so many samples; 0 where it is none, or nobody knows of how many."""
    return share * (1 - share) / many if many and 0 < share < 1 else 0.0


def _scatter(values: NDArray[np.float64]) -> float:
    """Return the variance of values about a straight line: a run that still learns is not noisy for that."""
    newest = values[-EVALUATIONS:]
    return float(np.square(np.diff(newest, n=2)).mean()) / 6 if len(newest) >= FEWEST else 0.0
