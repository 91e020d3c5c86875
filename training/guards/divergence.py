"""Detect a run that has lost what it had learned, and ignore one that is merely noisy.

The losses are smoothed (bias-corrected exponential mean, decay 0.98: some 50 steps), and the lowest smoothed loss is
remembered. The run has diverged once the smoothed loss has been above lowest + margin for PATIENCE steps in a row. The
margin is the largest of: a quarter of the lowest; half of what was learned since the detector was armed; four standard
deviations of single losses from the smoothed one, measured at the lowest. It is armed ARMED_STEPS after the warm-up,
since early losses fall steeply or rise with the learning rate. A loss enters as at most lowest + 2 margins: a spike of
any height has to last for about 60 steps to count, and one that recovers sooner never does.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

DECAY = 0.98
ARMED_STEPS = 100
PATIENCE = 50
PART_OF_LOWEST = 0.25
PART_OF_LEARNED = 0.5
DEVIATIONS = 4.0
ENTERS = 2.0


class Divergence:
    """Reads the loss of every step, on one rank. Its state is saved in checkpoints."""

    def __init__(self, warmup_steps: int = 0) -> None:
        self._armed_after = warmup_steps + ARMED_STEPS
        self._count = 0
        self._mean = self._variance = 0.0
        self._missing = 1.0
        self._first: float | None = None
        self._lowest = math.inf
        self._deviation = 0.0
        self._above = 0

    @property
    def smoothed(self) -> float:
        return self._mean

    @property
    def lowest(self) -> float:
        return self._lowest

    @property
    def margin(self) -> float:
        """By how much the smoothed loss may exceed the lowest one."""
        learned = (self._first or 0.0) - self._lowest
        return max(PART_OF_LOWEST * abs(self._lowest), PART_OF_LEARNED * learned, DEVIATIONS * self._deviation)

    def note(self, loss: float) -> bool:
        """Add a loss; return True once the run has diverged. Losses that are not finite are ignored."""
        if not math.isfinite(loss):
            return False
        self._count += 1
        armed = self._first is not None
        self._enter(min(loss, self._lowest + ENTERS * self.margin) if armed else loss)
        if not armed:
            if self._count >= self._armed_after:
                self._first = self._lowest = self._mean
                self._deviation = math.sqrt(self._variance)
            return False
        if self._mean < self._lowest:
            self._lowest, self._deviation = self._mean, math.sqrt(self._variance)
        self._above = self._above + 1 if self._mean > self._lowest + self.margin else 0
        return self._above >= PATIENCE

    def _enter(self, loss: float) -> None:
        self._missing *= DECAY
        weight = (1 - DECAY) / (1 - self._missing)
        difference = loss - self._mean
        self._mean += weight * difference
        self._variance = (1 - weight) * (self._variance + weight * difference * difference)

    def state_dict(self) -> dict[str, Any]:
        return {
            "seen": self._count,
            "mean": self._mean,
            "variance": self._variance,
            "missing": self._missing,
            "first": self._first,
            "lowest": self._lowest if self._first is not None else None,
            "deviation": self._deviation,
            "above": self._above,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        numbers = {name: state.get(name) for name in ("seen", "mean", "variance", "missing", "deviation", "above")}
        if not all(_number(value) for value in numbers.values()):
            return
        self._count, self._above = int(state["seen"]), int(state["above"])
        self._mean, self._variance = float(state["mean"]), float(state["variance"])
        self._missing, self._deviation = float(state["missing"]), float(state["deviation"])
        if _number(state.get("first")) and _number(state.get("lowest")):
            self._first, self._lowest = float(state["first"]), float(state["lowest"])


def _number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
