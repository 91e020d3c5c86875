"""Models of tables: a linear one, and a network with one hidden layer."""

from __future__ import annotations

from torch import Tensor, nn


class Linear(nn.Module):
    """(samples, features) → (samples, outputs). Starts from zero, which is as good as any for a convex loss."""

    def __init__(self, features: int, outputs: int) -> None:
        super().__init__()
        self.head = nn.Linear(features, outputs)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, rows: Tensor) -> Tensor:
        outputs: Tensor = self.head(rows)
        return outputs


class Perceptron(nn.Module):
    """(samples, features) → (samples, outputs), with one hidden layer."""

    def __init__(self, features: int, hidden: int, outputs: int, *, batch_norm: bool) -> None:
        super().__init__()
        self.hidden = nn.Linear(features, hidden)
        self.norm = nn.BatchNorm1d(hidden) if batch_norm else nn.Identity()
        self.head = nn.Linear(hidden, outputs)

    def forward(self, rows: Tensor) -> Tensor:
        outputs: Tensor = self.head(self.norm(self.hidden(rows)).relu())
        return outputs
