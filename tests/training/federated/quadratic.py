"""Express the losses of a linear regression's clients as quadratics, computed by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tests.training.federated.in_process import Federation


@dataclass(frozen=True)
class Quadratic:
    """F(w) = wᵀ A w / 2 − b w + c, of one client or of several combined."""

    a: Tensor
    b: Tensor
    c: Tensor

    def loss(self, w: Tensor) -> Tensor:
        return w @ self.a @ w / 2 - self.b @ w + self.c

    def gradient(self, w: Tensor) -> Tensor:
        return self.a @ w - self.b

    @property
    def minimiser(self) -> Tensor:
        found: Tensor = torch.linalg.solve(self.a, self.b)
        return found

    def descended(self, w: Tensor, steps: int, rate: float) -> Tensor:
        for _ in range(steps):
            w = w - rate * self.gradient(w)
        return w


def quadratics(federation: Federation) -> list[Quadratic]:
    """Return the loss of each client of a linear regression."""
    found = []
    for ids in federation.divided.train:
        rows, targets = federation.loop.federation.model.task.batch("train", ids)
        rows = torch.cat([rows, torch.ones(len(rows), 1)], dim=1).double()
        targets = targets.double()
        count = len(rows)
        found.append(Quadratic(rows.T @ rows / count, rows.T @ targets / count, targets.square().mean() / 2))
    return found


def together(parts: Sequence[Quadratic], weights: Sequence[float] | np.ndarray[Any, Any]) -> Quadratic:
    """Return their mean, by weights that need not add up to 1."""
    return Quadratic(*(mean([getattr(part, name) for part in parts], weights) for name in ("a", "b", "c")))


def mean(values: Sequence[Tensor], weights: Sequence[float] | np.ndarray[Any, Any]) -> Tensor:
    shares = torch.as_tensor(np.asarray(weights, dtype=np.float64) / np.sum(weights))
    return torch.einsum("i,i...->...", shares, torch.stack(list(values)))
