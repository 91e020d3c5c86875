"""Federations for tests, trained in this very process, or in two that share one run directory."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.training.ranks import fork
from training.attempt import place
from training.attempt.heartbeat import Heartbeat
from training.attempt.place import Place
from training.attempt.stopping import StopRequest
from training.federated.rounds import Rounds
from training.federation import config
from training.reporting.reporter import Reporter
from training.runtime.distributed import World

DIGITS: dict[str, Any] = {
    "recipe": "tabular",
    "rounds": 6,
    "clients": 10,
    "learning_rate": 0.3,
    "split": "dirichlet",
    "dirichlet": {"alpha": 0.3},
    "validate_every": 0,
    "checkpoint_every": 2,
    "keep_checkpoints": 9,
}
CPU = torch.device("cpu")


@contextmanager
def alone() -> Iterator[World]:
    """A world of one rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield World(0, 1, CPU)
    finally:
        dist.destroy_process_group()


@contextmanager
def federation(run_dir: Path, world: World, *, where: Place | None = None, **changes: Any) -> Iterator[Rounds]:
    """A run of DIGITS with these changes, to be trained; it goes on with whatever it finds in its directory."""
    where = where or place.by_hand(run_dir)
    reporter = Reporter.open(where.attempt_dir, rank=world.rank, incarnation=0)
    heartbeat = Heartbeat.open(where.attempt_dir, rank=world.rank, incarnation=0)
    stop = StopRequest()
    made = Rounds(config.parse({**DIGITS, **changes}), where, world, reporter=reporter, heartbeat=heartbeat, stop=stop)
    try:
        yield made
    finally:
        made.checkpoints.finish_flight()
        reporter.close()


def state(rounds: Rounds) -> dict[str, str]:
    """All that a checkpoint would hold, in hexadecimal, by dotted name."""
    return dict(_hexadecimal(rounds.server.state()))


def on_ranks(folder: Path, size: int, **changes: Any) -> list[dict[str, str]]:
    """The state at the end, by rank, of a run on so many processes."""
    where = place.by_hand(folder / f"{size}-ranks")
    ranks = [fork(_rank, folder / f"{size}-store", where, rank, size, changes) for rank in range(size)]
    for rank in ranks:
        rank.join(120)
        assert rank.exitcode == 0
    return [json.loads((where.attempt_dir / f"ended.{rank}.json").read_text()) for rank in range(size)]


def _rank(store: Path, where: Place, rank: int, size: int, changes: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(str(store), size), rank=rank, world_size=size)
    with federation(where.run_dir, World(rank, size, CPU), where=where, **changes) as rounds:
        assert rounds.run()
        (where.attempt_dir / f"ended.{rank}.json").write_text(json.dumps(state(rounds)))
    dist.destroy_process_group()


def _hexadecimal(part: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for name, value in part.items():
        if isinstance(value, Mapping):
            yield from _hexadecimal(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value.contiguous().numpy().tobytes().hex()
