"""Whole federated runs in the test's own process, as rank 0 alone would run them, with real checkpoints."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import torch

from training.attempt import place
from training.attempt.heartbeat import NullHeartbeat
from training.attempt.stopping import StopRequest
from training.checkpoint import storage
from training.checkpoint.staging import tree
from training.federated.rounds import Rounds
from training.federation.config import parse
from training.manifest import committed
from training.reporting.reporter import AnyReporter, NullReporter
from training.runtime.distributed import World

DIGITS: dict[str, Any] = {
    "recipe": "tabular",
    "clients": 12,
    "rounds": 6,
    "split": "dirichlet",
    "dirichlet": {"alpha": 1.0},
    "learning_rate": 0.3,
    "tabular": {"hidden": 16},
}
CONVEX: dict[str, Any] = {
    "recipe": "tabular",
    "clients": 5,
    "rounds": 5,
    "dtype": "fp64",
    "ridge": 1e-3,
    "tabular": {"source": "breast_cancer", "model": "logistic", "held_out": 0},
}


class Telling(NullReporter):
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.series: dict[str, dict[int, float]] = {}
        self.events: list[dict[str, Any]] = []

    def log(self, step: int, **values: float) -> None:
        for name, value in values.items():
            self.series.setdefault(name, {})[step] = value

    def event(self, kind: str, **data: Any) -> None:
        self.events.append({"kind": kind, **data})

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["kind"] == kind]


def start(folder: Path, run: dict[str, Any], *, reporter: AnyReporter | None = None) -> Rounds:
    """The next attempt of a run in this folder: from its newest checkpoint, if it has one."""
    return Rounds(
        parse(run),
        place.by_hand(folder),
        World(0, 1, torch.device("cpu")),
        reporter=reporter or NullReporter(),
        heartbeat=NullHeartbeat(),
        stop=StopRequest(),
    )


def run(folder: Path, table: dict[str, Any], *, reporter: AnyReporter | None = None) -> Rounds:
    """To its end."""
    loop = start(folder, table, reporter=reporter)
    assert loop.run()
    return loop


def digest(folder: Path) -> str:
    """Of every tensor in the newest checkpoint: the same bits, the same text."""
    newest = committed(folder / "job" / "checkpoints")[-1]
    where = folder / "job" / "checkpoints" / newest.name
    stored = storage.stored_tensors(where)
    tensors = {name: torch.empty(about.size, dtype=about.properties.dtype) for name, about in stored.items()}
    storage.read(tree({tuple(name.split(".")): tensor for name, tensor in tensors.items()}), where, None)
    found = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        found.update(name.encode() + tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return f"{newest.name} {found.hexdigest()}"
