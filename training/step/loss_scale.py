"""fp16's loss scale: as large as possible without overflowing gradients (torch.amp.GradScaler's rule).

Micikevicius et al., 2018, arXiv 1710.03740. The loss is multiplied by it before the backward pass, and the optimizer's
kernel divides the gradients by it. A step whose gradient is not finite is skipped and halves it; after GROWTH_STEPS
consecutive finite steps it doubles. All of it stays on the device; all ranks see the same norm, so their scales are
equal.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

FIRST = 2.0**16
GROWTH, BACKOFF = 2.0, 0.5
GROWTH_STEPS = 2000
FLOOR = 1.0
"""The lowest scale: a gradient that overflows even without scaling cannot be helped by it."""


class LossScale:
    """The loss scale and the number of consecutive finite steps. Its state is saved in checkpoints."""

    def __init__(self, device: torch.device, *, first: float = FIRST) -> None:
        self.value = torch.full((), first, device=device)
        """A float32 scalar."""
        self._finite = torch.zeros((), dtype=torch.int32, device=device)

    @property
    def at_floor(self) -> Tensor:
        return self.value <= FLOOR

    @torch.no_grad()
    def update(self, overflow: Tensor) -> None:
        """Adjust the scale after a step. `overflow`: 1 if its gradient was not finite, else 0; a float32 scalar."""
        torch._amp_update_scale_(self.value, self._finite, overflow, GROWTH, BACKOFF, GROWTH_STEPS)
        self.value.clamp_(min=FLOOR)

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value.item(), "finite_steps": int(self._finite.item())}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        value, finite = state.get("value"), state.get("finite_steps")
        if isinstance(value, int | float) and FLOOR <= value < math.inf:
            self.value.fill_(float(value))
        if type(finite) is int and 0 <= finite < GROWTH_STEPS:
            self._finite.fill_(finite)
