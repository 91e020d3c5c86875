"""Track the lowest validation losses of a run, to know at once when its state is one of the best."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any


class BestLosses:
    """The `count` lowest losses so far, and one more, which takes the place of a loss that is forgotten."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._losses: list[float] = []

    def add(self, loss: float) -> bool:
        """Add a loss if it is among the lowest; return whether it was added. Never if `count` is 0."""
        lowest = self._losses[: self._count]
        if not math.isfinite(loss) or not self._count or (len(lowest) == self._count and loss >= lowest[-1]):
            return False
        self._keep_lowest([*self._losses, loss])
        return True

    def forget(self, loss: float) -> None:
        """Remove a loss whose state could not be saved."""
        if loss in self._losses:
            self._losses.remove(loss)

    def state_dict(self) -> dict[str, Any]:
        return {"losses": list(self._losses)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        losses = state.get("losses")
        saved = losses if isinstance(losses, list) else []
        self._keep_lowest([float(loss) for loss in saved if isinstance(loss, int | float)])

    def _keep_lowest(self, losses: list[float]) -> None:
        self._losses = sorted(losses)[: self._count + 1]
