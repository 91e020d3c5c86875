"""Choose the checkpoint interval that minimises the cost of saves plus the work lost to failures (protocols.md §7).

A save costs C seconds in total: the stall at the step boundary, and the slowdown of the steps during the write. With a
failure every τ seconds, each loses half an interval on average. Saving every T seconds then takes the fraction
C/T + T/2τ of the time, which is minimal at T* = √(2Cτ) (Young, 1974, doi 10.1145/361147.361115).

Rank 0 measures and decides; the others learn of it with the flags that all ranks exchange at every step anyway.
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
COST_SAMPLES = 5
"""The cost of a save is the median of this many recent ones."""
MAX_CHANGE = 2.0
"""Maximum factor between one interval and the next, up or down."""
MIN_WRITES = 2.0
"""An interval is at least this many times as long as a write; otherwise a write would always be under way."""
OUTSIDE_STEPS = 101
MIN_OUTSIDE_STEPS = 5
"""Minimum number of steps outside of writes, to compare the steps during a write with."""
ASSUMED_NODE_HOURS = 24.0
"""Hours between failures of one node, if unknown. Deliberately short: saving too often is the cheaper mistake."""


@dataclass(frozen=True)
class Mtbf:
    """The mean time between failures of this run's nodes together."""

    seconds: float
    source: Literal["config", "portal", "assumed"]


def mtbf(config_hours: float | None, portal_hours: float | None, nodes: int) -> Mtbf:
    """Return the mean time between failures: as configured, else as the portal observed it, else assumed."""
    if config_hours:
        return Mtbf(config_hours * 3600, "config")
    if portal_hours:
        return Mtbf(portal_hours * 3600, "portal")
    return Mtbf(ASSUMED_NODE_HOURS * 3600 / max(1, nodes), "assumed")


def node_count(environment: Mapping[str, str] = os.environ) -> int:
    """Return the number of this run's nodes as the launcher or torchrun reports it; 1 without either."""
    nodes = environment.get("GROUP_WORLD_SIZE", "")
    return int(nodes) if nodes.isdecimal() and int(nodes) > 0 else 1


def best_interval(cost: float, mtbf_seconds: float) -> float:
    """Return T* = √(2Cτ) in seconds."""
    return math.sqrt(2 * cost * mtbf_seconds)


def overhead(interval: float, cost: float, mtbf_seconds: float) -> float:
    """Return the fraction of time spent on saves and on repeating work lost to failures: C/T + T/2τ."""
    return cost / interval + interval / (2 * mtbf_seconds)


def next_interval(current: float, *, cost: float, write: float, mtbf_seconds: float) -> float:
    """Return the best interval, limited relative to the current one and to the duration of a write."""
    nearest = min(max(best_interval(cost, mtbf_seconds), current / MAX_CHANGE), current * MAX_CHANGE)
    return max(nearest, MIN_WRITES * write)


class Cadence:
    """Decides when the next save is due, by the measured cost of saves. Its state is saved in checkpoints.

    `every`: "auto", or steps (0: never automatically). Multiples of `keep_every` steps are due in any case.
    """

    def __init__(
        self, every: Every, mtbf: Mtbf, *, keep_every: int = 0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.mtbf = mtbf
        self.interval = FIRST_SECONDS
        """Seconds from the beginning of one save to the next in automatic mode."""
        self._every, self._keep_every, self._clock = every, keep_every, clock
        self._costs: deque[float] = deque(maxlen=COST_SAMPLES)
        self._steps_outside: deque[float] = deque(maxlen=OUTSIDE_STEPS)
        self._steps_during: list[float] = []
        self._exchanges: deque[float] = deque(maxlen=OUTSIDE_STEPS)
        self._last_save: float | None = None
        self._must_repeat = self._is_repeat = False
        self._step_seconds = 0.0

    def is_due(self, step: int) -> bool:
        """Return whether a save is due at the end of this step; called at its beginning."""
        if self._must_repeat or (self._keep_every and step % self._keep_every == 0):
            return True
        if self._every != "auto":
            return bool(self._every) and step % self._every == 0
        now = self._clock()
        if self._last_save is None:
            self._last_save = now
        # At the boundary nearest to the end of the interval, not always the one after it.
        return now + self._step_seconds / 2 >= self._last_save + self.interval

    def note_step(self, seconds: float, *, saving: bool, exchange: float = 0.0) -> None:
        """Record how long a step took, and whether some rank was writing a checkpoint meanwhile.

        `exchange`: the part of it that occurs after some steps only and must not be attributed to the write.
        """
        self._step_seconds = seconds
        (self._steps_during if saving else self._steps_outside).append(seconds - exchange)
        self._exchanges.append(exchange)

    def note_begun(self) -> None:
        """Record that a save begins."""
        self._last_save = self._clock()
        self._steps_during = []
        self._is_repeat, self._must_repeat = self._must_repeat, False

    def note_damaged(self) -> None:
        """Record that the last save is damaged: another is due at once.

        Unless it was itself such a repetition: where every save is damaged, repeating them would only fill the disk.
        """
        self._must_repeat = not self._is_repeat

    def note_skipped(self) -> None:
        """Record that a due save was left out; the next one is due after a full interval."""
        self._last_save = self._clock()

    def note_written(self, *, stall: float, write: float) -> dict[str, Any] | None:
        """Record that a save was committed, and return the report about it once there is enough to compare.

        `stall`: seconds that training stood still. `write`: from the beginning, including the stall, to the commit.
        """
        during, self._steps_during = self._steps_during, []
        if not during or len(self._steps_outside) < MIN_OUTSIDE_STEPS:
            return None
        usual = median(self._steps_outside)
        self._costs.append(stall + max(0.0, sum(during) - usual * len(during)))
        cost = max(median(self._costs), 1e-6)
        if self._every == "auto":
            self.interval = next_interval(self.interval, cost=cost, write=write, mtbf_seconds=self.mtbf.seconds)
        # From the beginning of one save to the next, so it includes the cost of a save.
        step = usual + fmean(self._exchanges)
        current = self.interval if self._every == "auto" else self._every and self._every * step + cost
        best = max(best_interval(cost, self.mtbf.seconds), MIN_WRITES * write)
        return {
            "automatic": self._every == "auto",
            "cost_seconds": cost,
            "stall_seconds": stall,
            "write_seconds": write,
            "mtbf_seconds": self.mtbf.seconds,
            "source": self.mtbf.source,
            "best_interval_seconds": best,
            "interval_seconds": current,
            "overhead_fraction": overhead(current, cost, self.mtbf.seconds) if current else None,
            "best_overhead_fraction": overhead(best, cost, self.mtbf.seconds),
        }

    def state_dict(self) -> dict[str, Any]:
        return {"costs": list(self._costs), "interval": self.interval}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state from a checkpoint; invalid values are ignored."""
        costs, interval = state.get("costs"), state.get("interval")
        if isinstance(costs, list):
            self._costs.extend(float(cost) for cost in costs if _is_positive(cost))
        if _is_positive(interval):
            self.interval = float(interval)  # type: ignore[arg-type]


def _is_positive(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf
