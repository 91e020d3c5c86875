"""Run a federation in the process of the test, like rank 0 alone: to its end, or round by round."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from training.attempt import workspace
from training.attempt.heartbeat import NullHeartbeat
from training.attempt.stopping import StopRequest
from training.attempt.workspace import Workspace
from training.checkpoint import storage
from training.checkpoint.staging import tree
from training.federated.custom.user_code import UserCode
from training.federated.messages import MessagePair
from training.federated.round_report import RoundReport
from training.federated.rounds import Rounds
from training.federation.config import parse
from training.loop import LoopServices
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
DIGITS_FP64: dict[str, Any] = {
    "recipe": "tabular",
    "clients": 5,
    "split": "dirichlet",
    "learning_rate": 0.3,
    "dtype": "fp64",
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


def start(
    folder: Path,
    run: dict[str, Any],
    *,
    world: World | None = None,
    reporter: AnyReporter | None = None,
    code: Path | None = None,
    where: Workspace | None = None,
) -> Rounds:
    """Start the next attempt of a run in this folder, from its newest checkpoint, if it has one.

    `where`: the place that one of several ranks has made for all of them.
    """
    where = where or workspace.create_standalone(folder)
    return Rounds(
        parse(run),
        where,
        world or World(0, 1, torch.device("cpu")),
        LoopServices(reporter or NullReporter(), NullHeartbeat(), StopRequest()),
        user_code=UserCode(code, where.job_dir) if code is not None else None,
    )


def run(
    folder: Path,
    table: dict[str, Any],
    *,
    world: World | None = None,
    reporter: AnyReporter | None = None,
    where: Workspace | None = None,
) -> Rounds:
    """Run to the end."""
    rounds = start(folder, table, world=world, reporter=reporter, where=where)
    assert rounds.run()
    return rounds


def ready(folder: Path, run: dict[str, Any], *, world: World | None = None) -> Rounds:
    """Prepare for the first round."""
    rounds = start(folder, run, world=world)
    rounds._prepare(None)
    return rounds


def train(rounds: Rounds, count: int = 1) -> list[RoundReport]:
    """Train so many more rounds without saving."""
    reports = []
    for _ in range(count):
        reports.append(rounds._round(rounds.step + 1))
        rounds.step += 1
    return reports


def accuracy(rounds: Rounds) -> float:
    judged = rounds.evaluator.evaluate(rounds.server, should_continue=lambda: True)
    assert judged is not None
    return judged.means["accuracy"]


def accuracies(rounds: Rounds, count: int) -> list[float]:
    """Return the accuracies before the first of so many rounds, and after each."""
    found = [accuracy(rounds)]
    for _ in range(count):
        train(rounds)
        found.append(accuracy(rounds))
    return found


class Federation:
    """A federation with one algorithm, ready for its first round."""

    def __init__(self, folder: Path, algorithm: str, run: dict[str, Any], **more: Any) -> None:
        """`more`: fields of [run]; `options`: those of the algorithm."""
        options = {algorithm: given} if (given := more.pop("options", {})) else {}
        table = {"rounds": 1000, **run, "algorithm": algorithm, **options, **more}
        self.loop = ready(folder / f"{len(list(folder.iterdir()))}-{algorithm}", table)
        self.server, self.work, self.divided = self.loop.server, self.loop.work, self.loop.federation.divided

    def go(self, rounds: int = 1) -> Tensor:
        """Train so many more rounds and return the model."""
        train(self.loop, rounds)
        return self.model

    def round(self) -> RoundReport:
        return train(self.loop)[0]

    @property
    def messages(self) -> MessagePair:
        """Return the training request and its response."""
        return self.work.messages_of(self.work.training_task, self.server)

    @property
    def model(self) -> Tensor:
        """Return a copy of the model in float64."""
        return self.server.weights.double().clone()

    def put(self, model: Tensor) -> None:
        """Set the initial model instead of the one from the seed."""
        self.server.weights.copy_(model)

    def accuracy(self) -> float:
        return accuracy(self.loop)


class RecordingReporter(NullReporter):
    """A reporter that records what is reported."""

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


def resumed(folder: Path, run: dict[str, Any]) -> tuple[Rounds, Rounds]:
    """Run four rounds in one go, and four where a second attempt takes over a checkpoint's content after the second."""
    whole, first, second = (ready(folder / name, run) for name in ("whole", "first", "second"))
    train(whole, 4)
    train(first, 2)
    second.step = first.step
    second.server.load_state_dict(first.server.state_dict())
    for part, tensors in second.server.state().items():
        for name, tensor in tensors.items():
            tensor.copy_(first.server.state()[part][name])
    train(second, 2)
    return whole, second


def assert_same_state(first: Rounds, other: Rounds) -> None:
    """Check that everything a checkpoint holds is equal bit for bit."""
    parts = first.server.state(), other.server.state()
    assert parts[0].keys() == parts[1].keys()
    for part, tensors in parts[0].items():
        assert tensors.keys() == parts[1][part].keys()
        for name, tensor in tensors.items():
            assert torch.equal(tensor, parts[1][part][name]), f"{part}: {name}"


def digest(folder: Path) -> str:
    """Return a text of every tensor in the newest checkpoint: equal texts mean equal bits."""
    newest = committed(folder / "job" / "checkpoints")[-1]
    where = folder / "job" / "checkpoints" / newest.name
    stored = storage.stored_tensors(where)
    tensors = {name: torch.empty(about.size, dtype=about.properties.dtype) for name, about in stored.items()}
    storage.read(tree({tuple(name.split(".")): tensor for name, tensor in tensors.items()}), where, None)
    found = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        found.update(name.encode() + tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return f"{newest.name} {found.hexdigest()}"
