"""Judge columns of stored values by a rule's conditions, each distinct value once.

A verdict is a number whose bit i says whether condition i holds. Values are judged by the same code as live ones; a
column of 100,000 whole numbers has a few hundred distinct values, and a chunk whose extremes decide needs no decoding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from nodes.health.rules.condition import Condition, FieldValue
from portal.series.codec import Floats

MAX_TABLED = 4_096
"""Widest range of whole numbers that is judged by a table of all of them."""

Codes = NDArray[np.int64]


class FieldCondition(NamedTuple):
    """A condition on a field that `convert` computes of a stored value."""

    convert: Callable[[float], FieldValue]
    condition: Condition


class ColumnVerdicts:
    """Judges the values of one series by these conditions."""

    def __init__(self, conditions: Sequence[FieldCondition]) -> None:
        self.conditions = conditions
        self._is_monotone = all(item.condition.operator in ("<", "<=", ">", ">=") for item in conditions)
        self._codes: dict[float, int] = {}

    def at(self, value: float) -> int:
        code = self._codes.get(value)
        if code is None:
            code = sum(item.condition.holds(item.convert(value)) << bit for bit, item in enumerate(self.conditions))
            if len(self._codes) < MAX_TABLED:
                self._codes[value] = code
        return code

    def of(self, values: Floats) -> Codes:
        """Return the verdict of each value; all of them are finite."""
        if not len(values):
            return np.zeros(0, np.int64)
        low, high = float(values.min()), float(values.max())
        if high - low < MAX_TABLED and bool((values == np.rint(values)).all()):
            table = np.array([self.at(float(value)) for value in range(int(low), int(high) + 1)], np.int64)
            tabled: Codes = table[(values - low).astype(np.int64)]
            return tabled
        distinct, places = np.unique(values, return_inverse=True)
        judged: Codes = np.array([self.at(float(value)) for value in distinct], np.int64)[places]
        return judged

    def over(self, low: float, high: float) -> int | None:
        """Return the verdict that every value from low to high has; None if they differ, or nobody can say.

        Between two whole numbers only whole numbers are assumed: what has a fraction is judged by its conditions.
        """
        first = self.at(low)
        if low == high:
            return first
        if self._is_monotone:  # a threshold that both ends are on one side of is not between them
            return first if first == self.at(high) else None
        if not (low.is_integer() and high.is_integer() and high - low < MAX_TABLED):
            return None
        same = all(self.at(float(value)) == first for value in range(int(low) + 1, int(high) + 1))
        return first if same else None
