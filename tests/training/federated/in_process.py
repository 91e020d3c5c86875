"""A small federation in the test's own process, round by round, and its quadratic losses computed by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from training.attempt import place
from training.attempt.heartbeat import NullHeartbeat
from training.attempt.stopping import StopRequest
from training.federated.messages import Messages
from training.federated.rounds import Rounds
from training.federated.telling import Told
from training.federation.config import parse
from training.reporting.reporter import NullReporter
from training.runtime.distributed import World

REGRESSION: dict[str, Any] = {
    "recipe": "tabular",
    "clients": 4,
    "split": "quantity",
    "batch": 1000,
    "learning_rate": 0.05,
    "dtype": "fp64",
    "tabular": {"source": "synthetic", "model": "linear", "samples": 60, "features": 3, "noise": 2.0, "held_out": 0},
}
"""Least squares, whose clients disagree: they have little, and one has four times what another has; whole batches."""
DIGITS: dict[str, Any] = {
    "recipe": "tabular",
    "clients": 5,
    "split": "dirichlet",
    "learning_rate": 0.3,
    "dtype": "fp64",
    "tabular": {"hidden": 16},
}


class Federation:
    """Of one algorithm, and ready for its first round."""

    def __init__(self, folder: Path, algorithm: str, run: dict[str, Any], **more: Any) -> None:
        """`more`: fields of [run]; `options`: those of the algorithm."""
        folder = folder / f"{len(list(folder.iterdir()))}-{algorithm}"
        options = {algorithm: given} if (given := more.pop("options", {})) else {}
        self.config = parse({"rounds": 1000, **run, "algorithm": algorithm, **options, **more})
        world = World(0, 1, torch.device("cpu"))
        self.loop = Rounds(
            self.config,
            place.by_hand(folder),
            world,
            reporter=NullReporter(),
            heartbeat=NullHeartbeat(),
            stop=StopRequest(),
        )
        self.loop._prepare(None)
        self.server, self.work, self.divided = self.loop.server, self.loop.work, self.loop.federation.divided
        self.rounds = 0

    def go(self, rounds: int = 1) -> Tensor:
        """The model after so many more rounds."""
        for _ in range(rounds):
            self.round()
        return self.model

    def round(self) -> Told:
        self.rounds += 1
        return self.loop._round(self.rounds)

    @property
    def messages(self) -> Messages:
        """Of the question that trains, and of its answer."""
        return self.work.messages_of(self.work.training, self.server)

    @property
    def model(self) -> Tensor:
        """A copy, in float64."""
        return self.server.weights.double().clone()

    def put(self, model: Tensor) -> None:
        """What everybody begins with instead of what the seed gives."""
        self.server.weights.copy_(model)

    def accuracy(self) -> float:
        judged = self.loop.judge.judge(self.server, goes_on=lambda: True)
        assert judged is not None
        return judged.means["accuracy"]


@dataclass(frozen=True)
class Quadratic:
    """F(w) = wᵀ A w / 2 − b w + c, of one client or of several together."""

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
    """The loss of each client of a linear regression."""
    found = []
    for ids in federation.divided.train:
        rows, targets = federation.loop.federation.model.task.batch("train", ids)
        rows = torch.cat([rows, torch.ones(len(rows), 1)], dim=1).double()
        targets = targets.double()
        count = len(rows)
        found.append(Quadratic(rows.T @ rows / count, rows.T @ targets / count, targets.square().mean() / 2))
    return found


def together(parts: Sequence[Quadratic], weights: Sequence[float] | np.ndarray[Any, Any]) -> Quadratic:
    """Their mean, by weights that need not add up to 1."""
    return Quadratic(*(mean([getattr(part, name) for part in parts], weights) for name in ("a", "b", "c")))


def mean(values: Sequence[Tensor], weights: Sequence[float] | np.ndarray[Any, Any]) -> Tensor:
    shares = torch.as_tensor(np.asarray(weights, dtype=np.float64) / np.sum(weights))
    return torch.einsum("i,i...->...", shares, torch.stack(list(values)))
