"""Which rank keeps the others waiting.

In a step all ranks end together, since they exchange gradients; what differs is how long each takes to get there, its
own time (training.step.own_time). Every WINDOW steps the ranks exchange their means: one small reduction on the host,
begun with a step, read at its end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields
from statistics import median_low

import torch
import torch.distributed as dist

from training.runtime.distributed import World
from training.step.own_time import PARTS, OwnTime, Spent

WINDOW = 20
"""Steps."""
WINDOWS = 3
"""A rank is told of once it was slow for so many in a row."""
FACTOR = 1.5
"""Slow: its own time is so many times the median rank's …"""
LEAST_SECONDS = 0.005
"""… and longer by so much: on a busy machine small times vary by large factors."""
LEAST_PART = 0.1
"""… and by this part of the median step."""


@dataclass(frozen=True)
class Straggler:
    """A rank that was slow for several windows."""

    rank: int
    factor: float
    """Its own time over the median rank's."""
    part: str
    """Where most of the difference is."""
    own_seconds: float
    median_seconds: float


class Stragglers:
    """All ranks' own times, window after window. Every rank comes to the same answer."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._work: dist.Work | None = None
        self._table = torch.zeros(world.size, len(fields(Spent)))
        self._slow: dict[int, int] = {}
        self.named: Straggler | None = None
        """The slowest of the ranks that are told of and still slow, as it was in the last window."""

    def begin(self, own: OwnTime) -> None:
        """Tells the others of this rank's window."""
        self._table.zero_()
        self._table[self._world.rank] = torch.tensor(astuple(own.means()))
        self._work = dist.all_reduce(self._table, async_op=True)

    def end(self) -> list[Straggler]:
        """Ranks that have just been slow for WINDOWS windows in a row."""
        if self._work is None:
            return []
        self._work.wait()
        self._work = None
        return self.judge([Spent(*row) for row in self._table.tolist()])

    def judge(self, ranks: Sequence[Spent]) -> list[Straggler]:
        """What all have told, by rank."""
        found, named = [], []
        usual, step = median_low(spent.own for spent in ranks), median_low(spent.step for spent in ranks)
        for rank, spent in enumerate(ranks):
            seconds, over = spent.own, spent.own - usual
            if over < max(LEAST_SECONDS, LEAST_PART * step) or seconds < FACTOR * usual:
                self._slow.pop(rank, None)
                continue
            self._slow[rank] = self._slow.get(rank, 0) + 1
            if self._slow[rank] >= WINDOWS:
                factor = seconds / max(usual, 1e-9)
                named.append(Straggler(rank, factor, _widest(ranks, spent), seconds, usual))
                found += named[-1:] if self._slow[rank] == WINDOWS else []
        self.named = max(named, key=lambda straggler: straggler.own_seconds, default=None)
        return found


def _widest(ranks: Sequence[Spent], slow: Spent) -> str:
    """The part in which this one is most over the median rank."""

    def over(part: str) -> float:
        return float(getattr(slow, part) - median_low(getattr(spent, part) for spent in ranks))

    return max(PARTS, key=over)
