"""Which rank keeps the others waiting.

In a step all ranks end together, since they exchange gradients; what differs is how long each takes to get there, its
own time (training.step.own_time). Every WINDOW steps the ranks exchange their means: one small reduction on the host,
begun with a step, read at its end.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median_low

import torch
import torch.distributed as dist

from training.distributed import World
from training.step.own_time import PARTS, OwnTime

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
        self._table = torch.zeros(world.size, len(PARTS) + 1)
        self._slow: dict[int, int] = {}

    def begin(self, own: OwnTime) -> None:
        """Tells the others of this rank's window."""
        self._table.zero_()
        self._table[self._world.rank] = torch.tensor(own.means())
        self._work = dist.all_reduce(self._table, async_op=True)

    def end(self) -> list[Straggler]:
        """Ranks that have just been slow for WINDOWS windows in a row."""
        if self._work is None:
            return []
        self._work.wait()
        self._work = None
        return self.judge(self._table.tolist())

    def judge(self, table: list[list[float]]) -> list[Straggler]:
        """`table`: by rank, the parts of its own time and the whole step, seconds."""
        found = []
        own = [sum(row[: len(PARTS)]) for row in table]
        usual, step = median_low(own), median_low([row[-1] for row in table])
        for rank, seconds in enumerate(own):
            over = seconds - usual
            if over < max(LEAST_SECONDS, LEAST_PART * step) or seconds < FACTOR * usual:
                self._slow.pop(rank, None)
                continue
            self._slow[rank] = self._slow.get(rank, 0) + 1
            if self._slow[rank] == WINDOWS:
                factor = seconds / max(usual, 1e-9)
                found.append(Straggler(rank, factor, _widest(table, rank), seconds, usual))
        return found


def _widest(table: list[list[float]], rank: int) -> str:
    """The part in which this rank is most over the median rank."""
    over = [table[rank][i] - median_low([row[i] for row in table]) for i in range(len(PARTS))]
    return PARTS[over.index(max(over))]
