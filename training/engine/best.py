"""The lowest validation losses of a run, so that it knows at once when one of the best states is at hand."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any


class BestLosses:
    """The `count` lowest so far. Every rank is told the same, so all come to the same answers."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._losses: list[float] = []

    def enters(self, loss: float) -> bool:
        """Takes note of a loss; whether it is among the lowest. Never if none are wanted."""
        if not math.isfinite(loss):
            return False
        lowest = sorted([*self._losses, loss])[: self._count]
        entered = len(lowest) > len(self._losses) or lowest != self._losses
        self._losses = lowest
        return entered

    def remember(self) -> dict[str, Any]:
        return {"losses": self._losses}

    def recall(self, told: Mapping[str, Any]) -> None:
        losses = told.get("losses")
        known = [float(loss) for loss in losses if isinstance(loss, int | float)] if isinstance(losses, list) else []
        self._losses = sorted(known)[: self._count]
