"""Find the rank that keeps the others waiting.

All ranks end a step together, since they exchange gradients; they differ in how long each takes to get there, its own
time (training.step.own_time). Every WINDOW steps the ranks exchange their mean own times: one small reduction on the
host, begun with a step and read at its end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields
from statistics import median_low

import torch
import torch.distributed as dist

from training.runtime.distributed import World
from training.step.own_time import PARTS, OwnTime, StepMeans

WINDOW = 20
"""Steps."""
WINDOWS = 3
"""A rank is reported once it was slow for this many windows in a row."""
FACTOR = 1.5
"""A rank is slow if its own time is this many times the median rank's …"""
MIN_SECONDS = 0.005
"""… and longer by this much, as small times vary by large factors on a busy machine, …"""
MIN_PART = 0.1
"""… and by this fraction of the median step."""


@dataclass(frozen=True)
class Straggler:
    """A rank that was slow for several windows."""

    rank: int
    factor: float
    """Its own time divided by the median rank's."""
    part: str
    """The part of a step with most of the difference."""
    own_seconds: float
    median_seconds: float


class Stragglers:
    """Compares the own times of all ranks, window by window. Every rank gets the same result."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._work: dist.Work | None = None
        self._table = torch.zeros(world.size, len(fields(StepMeans)))
        self._slow_windows: dict[int, int] = {}
        self.slowest: Straggler | None = None
        """The slowest of the ranks that were reported and are still slow, as of the last window."""

    def begin(self, own_time: OwnTime) -> None:
        """Start exchanging the times of the window that has ended."""
        self._table.zero_()
        self._table[self._world.rank] = torch.tensor(astuple(own_time.means()))
        self._work = dist.all_reduce(self._table, async_op=True)

    def end(self) -> list[Straggler]:
        """Return ranks that have just been slow for WINDOWS windows in a row."""
        if self._work is None:
            return []
        self._work.wait()
        self._work = None
        return self.judge([StepMeans(*row) for row in self._table.tolist()])

    def judge(self, ranks: Sequence[StepMeans]) -> list[Straggler]:
        """Judge the times of all ranks, in order of rank; return ranks that have just become stragglers."""
        new, slow = [], []
        usual, step = median_low(spent.own for spent in ranks), median_low(spent.step for spent in ranks)
        for rank, spent in enumerate(ranks):
            seconds, over = spent.own, spent.own - usual
            if over < max(MIN_SECONDS, MIN_PART * step) or seconds < FACTOR * usual:
                self._slow_windows.pop(rank, None)
                continue
            self._slow_windows[rank] = self._slow_windows.get(rank, 0) + 1
            if self._slow_windows[rank] >= WINDOWS:
                factor = seconds / max(usual, 1e-9)
                slow.append(Straggler(rank, factor, _slowest_part(ranks, spent), seconds, usual))
                new += slow[-1:] if self._slow_windows[rank] == WINDOWS else []
        self.slowest = max(slow, key=lambda straggler: straggler.own_seconds, default=None)
        return new


def _slowest_part(ranks: Sequence[StepMeans], slow: StepMeans) -> str:
    """Return the part of a step in which this rank exceeds the median most."""

    def over(part: str) -> float:
        return float(getattr(slow, part) - median_low(getattr(spent, part) for spent in ranks))

    return max(PARTS, key=over)
