"""How often to save: so that what the saves cost and what failures lose add up to the least (protocols.md §7).

A save costs C seconds, all its consequences counted: the stall at the step's boundary, and by how much the steps during
the write were slower than the others. A failure every τ seconds loses half an interval. Saving every T seconds then
takes the part C/T + T/2τ of the time, which is least at T* = √(2Cτ) (Young, 1974, doi 10.1145/361147.361115).

Rank 0 measures and decides; the others learn of it with the flags that all exchange at every step anyway.
"""

from __future__ import annotations

import math
import os
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any, Literal

Every = int | Literal["auto"]

FIRST_SECONDS = 60.0
"""Seconds until the first save of a run that has not measured one yet."""
COSTS = 5
"""A save costs what the median of so many last ones did."""
CHANGE = 2.0
"""An interval is at most so many times the one before, or that part of it."""
WRITES = 2.0
"""An interval is at least so many times as long as the write, which would else be always under way."""
OUTSIDE_STEPS = 101
LEAST_OUTSIDE = 5
"""Fewer steps outside a write tell nothing about how slow those during one were."""
ASSUMED_NODE_HOURS = 24.0
"""Hours between one node's failures, where nobody knows better. Deliberately short: it costs less to save too often."""


@dataclass(frozen=True)
class Mtbf:
    """The mean time between failures of this run's nodes together."""

    seconds: float
    source: Literal["config", "portal", "assumed"]


def mtbf(config_hours: float | None, portal_hours: float | None, nodes: int) -> Mtbf:
    """What a person has written, else what the portal has seen, else an assumption, which is labelled as one."""
    if config_hours:
        return Mtbf(config_hours * 3600, "config")
    if portal_hours:
        return Mtbf(portal_hours * 3600, "portal")
    return Mtbf(ASSUMED_NODE_HOURS * 3600 / max(1, nodes), "assumed")


def nodes_here(environment: Mapping[str, str] = os.environ) -> int:
    """The nodes of this run, as the launcher or torchrun tells; 1 where nobody does."""
    nodes = environment.get("GROUP_WORLD_SIZE", "")
    return int(nodes) if nodes.isdecimal() and int(nodes) > 0 else 1


def best_interval(cost: float, mtbf_seconds: float) -> float:
    """T* = √(2Cτ), seconds."""
    return math.sqrt(2 * cost * mtbf_seconds)


def overhead(interval: float, cost: float, mtbf_seconds: float) -> float:
    """The part of all time that goes into saves and into work lost to failures: C/T + T/2τ."""
    return cost / interval + interval / (2 * mtbf_seconds)


def next_interval(present: float, *, cost: float, write: float, mtbf_seconds: float) -> float:
    """The best interval, as far as it may be from the present one and from the time that a write takes."""
    near = min(max(best_interval(cost, mtbf_seconds), present / CHANGE), present * CHANGE)
    return max(near, WRITES * write)


class Cadence:
    """When the next save is due, and what is known of what they cost. Part of what a checkpoint remembers.

    `every`: "auto", or steps (0: never by itself). Multiples of `keep_every` steps are due in any case.
    """

    def __init__(
        self, every: Every, mtbf: Mtbf, *, keep_every: int = 0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.mtbf = mtbf
        self.interval = FIRST_SECONDS
        """Seconds from the beginning of a save to that of the next, where it is automatic."""
        self._every, self._keep_every, self._clock = every, keep_every, clock
        self._costs: deque[float] = deque(maxlen=COSTS)
        self._outside: deque[float] = deque(maxlen=OUTSIDE_STEPS)
        self._during: list[float] = []
        self._exchanges: deque[float] = deque(maxlen=OUTSIDE_STEPS)
        self._last: float | None = None
        self._owed = self._makes_up = False
        self._step_seconds = 0.0

    def due(self, step: int) -> bool:
        """Whether a save is due at the end of this step, asked at its beginning."""
        if self._owed or (self._keep_every and step % self._keep_every == 0):
            return True
        if self._every != "auto":
            return bool(self._every) and step % self._every == 0
        now = self._clock()
        if self._last is None:
            self._last = now
        # At the boundary nearest to the interval's end, not always the one after it.
        return now + self._step_seconds / 2 >= self._last + self.interval

    def note_step(self, seconds: float, *, saving: bool, exchange: float = 0.0) -> None:
        """How long a step took, and whether some rank was writing a checkpoint meanwhile.

        `exchange`: of it what comes after some steps only, for which a write beside one of them must not be blamed.
        """
        self._step_seconds = seconds
        (self._during if saving else self._outside).append(seconds - exchange)
        self._exchanges.append(exchange)

    def note_begun(self) -> None:
        """A save begins."""
        self._last = self._clock()
        self._during = []
        self._makes_up, self._owed = self._owed, False

    def note_damaged(self) -> None:
        """The save that has ended is no good: one is due at once.

        Unless it was itself to make up for another: where every save is spoilt, they would only fill the disk.
        """
        self._owed = not self._makes_up

    def note_skipped(self) -> None:
        """A save was due and left out: the next one is as far away as after one that was not."""
        self._last = self._clock()

    def note_written(self, *, stall: float, write: float) -> dict[str, Any] | None:
        """A save is committed, beside which training went on. What is told of it, once there is something to compare.

        `stall`: seconds that training stood still. `write`: from the beginning, the stall with it, to the commit.
        """
        during, self._during = self._during, []
        if not during or len(self._outside) < LEAST_OUTSIDE:
            return None
        usual = median(self._outside)
        self._costs.append(stall + max(0.0, sum(during) - usual * len(during)))
        cost = max(median(self._costs), 1e-6)
        if self._every == "auto":
            self.interval = next_interval(self.interval, cost=cost, write=write, mtbf_seconds=self.mtbf.seconds)
        # From one save's beginning to the next's, so what a save costs is in it.
        step = usual + fmean(self._exchanges)
        present = self.interval if self._every == "auto" else self._every and self._every * step + cost
        best = max(best_interval(cost, self.mtbf.seconds), WRITES * write)
        return {
            "automatic": self._every == "auto",
            "cost_seconds": cost,
            "stall_seconds": stall,
            "write_seconds": write,
            "mtbf_seconds": self.mtbf.seconds,
            "source": self.mtbf.source,
            "best_interval_seconds": best,
            "interval_seconds": present,
            "overhead_fraction": overhead(present, cost, self.mtbf.seconds) if present else None,
            "best_overhead_fraction": overhead(best, cost, self.mtbf.seconds),
        }

    def remember(self) -> dict[str, Any]:
        return {"costs": list(self._costs), "interval": self.interval}

    def recall(self, told: Mapping[str, Any]) -> None:
        """Goes on from what a checkpoint remembers; what makes no sense is forgotten."""
        costs, interval = told.get("costs"), told.get("interval")
        if isinstance(costs, list):
            self._costs.extend(float(cost) for cost in costs if _positive(cost))
        if _positive(interval):
            self.interval = float(interval)  # type: ignore[arg-type]


def _positive(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf
