"""Compute bands: a value's distribution across ranks at each step (min, median, max, and the worst rank).

The worst rank is the one with the largest value; a rank whose value is NaN takes precedence. Min, median and max are
over the other ranks' values; if every rank has NaN, they are NaN.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from portal.series.codec import Floats, Integers

PATIENCE_S = 10.0  # seconds after which a step gets its band even if some ranks have not reported it
WINDOW = 512  # steps that wait, or may still be revised
RANKS = 8_192


@dataclass(frozen=True)
class Band:
    """Columns of equal length, in rising order of step."""

    step: Integers
    min: Floats
    median: Floats
    max: Floats
    worst: Integers

    def __len__(self) -> int:
        return len(self.step)


def across(values: Floats, there: NDArray[np.bool_], ranks: Integers) -> tuple[Floats, Floats, Floats, Integers]:
    """Return min, median, max and worst rank of each row of `values` (steps × ranks); `there` marks reported ones."""
    present = np.where(there, values, np.nan)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # rows that contain only NaN
        low, middle, high = (np.nanmin(present, 1), np.nanmedian(present, 1), np.nanmax(present, 1))
    badness = np.where(there, np.where(np.isnan(values), np.inf, values), -np.inf)
    lost = there & np.isnan(values)
    worst = np.where(lost.any(1), lost.argmax(1), badness.argmax(1))
    return low, middle, high, ranks[worst]


@dataclass
class BandCollector:
    """Collects the ranks' values of one series and incarnation as they arrive, and computes their bands.

    A step's band is due when all ranks seen so far have reported it, or `PATIENCE_S` after the first did; ranks that
    report later revise it.
    """

    _columns: dict[int, int] = field(default_factory=dict)  # rank → column
    _rows: dict[int, int] = field(default_factory=dict)  # step → row, oldest first
    _values: Floats = field(default_factory=lambda: np.zeros((WINDOW, 0)))
    _there: NDArray[np.bool_] = field(default_factory=lambda: np.zeros((WINDOW, 0), np.bool_))
    _since: Floats = field(default_factory=lambda: np.zeros(WINDOW))
    _done: NDArray[np.bool_] = field(default_factory=lambda: np.zeros(WINDOW, np.bool_))

    @property
    def ranks(self) -> int:
        return len(self._columns)

    @property
    def columns(self) -> int:
        """Return how many columns of WINDOW values it uses."""
        return int(self._values.shape[1])

    def add(self, rank: int, step: Integers, value: Floats, now: float) -> None:
        """Add one rank's new values, in order of arrival; `now` is monotonic."""
        if rank not in self._columns:
            if len(self._columns) >= RANKS:
                return
            self._columns[rank] = len(self._columns)
            self._widen()
        column = self._columns[rank]
        rows = np.array([self._row(int(s), now) for s in step[-WINDOW:]], np.int64)
        self._values[rows, column] = value[-WINDOW:]
        self._there[rows, column] = True

    def complete(self, steps: Iterable[int]) -> Band | None:
        """Return the bands of those of these steps that all ranks have reported, or that had one already."""
        if self.ranks < 2:
            return None
        count = self._there.sum(1)
        ready = [s for s in sorted(set(steps)) if (row := self._rows.get(s)) is not None and self._ready(row, count)]
        return self._band(ready)

    def overdue(self, now: float) -> Band | None:
        """Return the bands of steps that have waited for PATIENCE_S."""
        used = len(self._rows)  # the rows that have a step
        waits = ~self._done[:used] & (self._since[:used] <= now - PATIENCE_S)
        if self.ranks < 2 or not waits.any():
            return None
        return self._band(sorted(step for step, row in self._rows.items() if waits[row]))

    def _ready(self, row: int, count: NDArray[np.int64]) -> bool:
        return bool(self._done[row]) or int(count[row]) == self.ranks

    def _band(self, steps: list[int]) -> Band | None:
        if not steps:
            return None
        rows = np.array([self._rows[s] for s in steps])
        self._done[rows] = True
        ranks = np.fromiter(self._columns, np.int64, self.ranks)
        width = slice(0, self.ranks)
        return Band(np.array(steps, np.int64), *across(self._values[rows, width], self._there[rows, width], ranks))

    def _row(self, step: int, now: float) -> int:
        """Return the step's row; a new step replaces the oldest one."""
        if (row := self._rows.get(step)) is not None:
            return row
        row = len(self._rows) if len(self._rows) < WINDOW else self._rows.pop(next(iter(self._rows)))
        self._rows[step] = row
        self._there[row], self._done[row], self._since[row] = False, False, now
        return row

    def _widen(self) -> None:
        """Double the number of columns, so that a thousand ranks cost ten copies."""
        have = self._values.shape[1]
        if self.ranks > have:
            more = max(8, have)
            self._values = np.hstack((self._values, np.zeros((WINDOW, more))))
            self._there = np.hstack((self._there, np.zeros((WINDOW, more), np.bool_)))
