"""The lowest validation losses of a run, so that it knows at once when one of the best states is at hand."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any


class BestLosses:
    """The `count` lowest so far, and one more: should the last that entered be forgotten, it is among them again."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._losses: list[float] = []

    def enters(self, loss: float) -> bool:
        """Takes note of a loss if it is among the lowest, and says whether. Never if none are wanted."""
        lowest = self._losses[: self._count]
        if not math.isfinite(loss) or not self._count or (len(lowest) == self._count and loss >= lowest[-1]):
            return False
        self._note([*self._losses, loss])
        return True

    def forget(self, loss: float) -> None:
        """Its state could not be saved."""
        if loss in self._losses:
            self._losses.remove(loss)

    def remember(self) -> dict[str, Any]:
        return {"losses": list(self._losses)}

    def recall(self, told: Mapping[str, Any]) -> None:
        losses = told.get("losses")
        known = losses if isinstance(losses, list) else []
        self._note([float(loss) for loss in known if isinstance(loss, int | float)])

    def _note(self, losses: list[float]) -> None:
        self._losses = sorted(losses)[: self._count + 1]
