"""A federation in this very process, ready for its first round."""

from __future__ import annotations

from pathlib import Path

import torch

from training.attempt.heartbeat import NullHeartbeat
from training.attempt.place import by_hand
from training.attempt.stopping import StopRequest
from training.federated.rounds import Rounds
from training.federation.config import parse
from training.reporting.reporter import NullReporter
from training.runtime.distributed import World


def started(folder: Path, **run: object) -> Rounds:
    rounds = Rounds(
        parse({"recipe": "tabular", **run}),
        by_hand(folder),
        World(0, 1, torch.device("cpu")),
        reporter=NullReporter(),
        heartbeat=NullHeartbeat(),
        stop=StopRequest(),
    )
    rounds._prepare(None)
    return rounds


def played(rounds: Rounds, count: int) -> list[float]:
    """So many rounds; the accuracy before the first, and after each."""
    found = [accuracy(rounds)]
    for number in range(1, count + 1):
        rounds._round(number)
        found.append(accuracy(rounds))
    return found


def accuracy(rounds: Rounds) -> float:
    judged = rounds.judge.judge(rounds.server, goes_on=lambda: True)
    assert judged is not None
    return judged.means["accuracy"]


def resumed(folder: Path, **run: object) -> tuple[Rounds, Rounds]:
    """Four rounds at a stretch, and four of which another takes over after the second what a checkpoint would hold."""
    whole, first, second = (started(folder / name, **run) for name in ("whole", "first", "second"))
    for number in (1, 2, 3, 4):
        whole._round(number)
    for number in (1, 2):
        first._round(number)
    second.server.recall(first.server.remember())
    for part, tensors in second.server.state().items():
        for name, tensor in tensors.items():
            tensor.copy_(first.server.state()[part][name])
    for number in (3, 4):
        second._round(number)
    return whole, second


def assert_same_state(one: Rounds, other: Rounds) -> None:
    """Bit for bit, whatever a checkpoint holds."""
    parts = one.server.state(), other.server.state()
    assert parts[0].keys() == parts[1].keys()
    for part, tensors in parts[0].items():
        assert tensors.keys() == parts[1][part].keys()
        for name, tensor in tensors.items():
            assert torch.equal(tensor, parts[1][part][name]), f"{part}: {name}"
