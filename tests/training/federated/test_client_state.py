"""Client state is stored once, on its home rank; rounds change it in place, and saves write it without a copy."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

from tests.training.federated.in_process import DIGITS, digest, ready, run, start, train
from tests.training.ranks import fork
from training.attempt import workspace
from training.attempt.workspace import Workspace
from training.federated.client_state import ClientState
from training.federated.client_tasks import ClientUpdates
from training.federated.controller import QuorumLost
from training.federated.rounds import Rounds
from training.federated.server import Server
from training.runtime.distributed import World

SCAFFOLD: dict[str, Any] = {**DIGITS, "algorithm": "scaffold", "clients": 23, "per_round": 17, "rounds": 4}
TABLES: dict[str, dict[str, Any]] = {
    "fedavg": {**SCAFFOLD, "algorithm": "fedavg"},
    "scaffold": SCAFFOLD,
    "feddyn late": {**SCAFFOLD, "algorithm": "feddyn", "pace": "deadline", "deadline": {"quantile": 0.5}},
    "ditto": {**SCAFFOLD, "algorithm": "ditto", "finetune_steps": 2},
    "fedper topk": {**SCAFFOLD, "algorithm": "fedper", "filters": ["topk"]},
    "gossip": {key: value for key, value in SCAFFOLD.items() if key != "per_round"} | {"algorithm": "gossip"},
}


def on_ranks(where: Workspace, size: int, table: dict[str, Any]) -> None:
    ranks = [fork(_rank, where, rank, size, table) for rank in range(size)]
    for rank in ranks:
        rank.join(120)
        assert rank.exitcode == 0


def _rank(where: Workspace, rank: int, size: int, table: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    store = FileStore(str(where.attempt_dir / "store"), size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    rounds = run(where.run_dir, table, world=World(rank, size, torch.device("cpu")), where=where)
    home = rounds.server.client_state.home
    assert len(home) <= -(-23 // size)
    for values in rounds.server.client_state.values():
        assert len(values) == len(home)
    dist.destroy_process_group()


@contextmanager
def as_an_older_version(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Checkpoints have one chunk for all clients, copied before it is written."""
    with monkeypatch.context() as older:
        older.setattr(Server, "saved_state", Server.state)
        yield


@pytest.mark.slow
@pytest.mark.parametrize("table", TABLES.values(), ids=TABLES)
def test_ranks_divide_it_and_go_on_from_each_other_s_checkpoints(
    table: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A round on one rank of an older version, one on three, two on two: the same bits as four on one."""
    run(tmp_path / "alone", table)
    with as_an_older_version(monkeypatch):
        run(tmp_path / "ranks", {**table, "rounds": 1})
    on_ranks(workspace.create_standalone(tmp_path / "ranks"), 3, {**table, "rounds": 2})
    on_ranks(workspace.create_standalone(tmp_path / "ranks"), 2, table)
    assert digest(tmp_path / "ranks") == digest(tmp_path / "alone")


@pytest.mark.parametrize("algorithm", ["scaffold", "ditto"])
def test_a_checkpoint_of_an_older_version_is_resumed(
    algorithm: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = {**SCAFFOLD, "algorithm": algorithm}
    run(tmp_path / "whole", table)
    with as_an_older_version(monkeypatch):
        run(tmp_path / "resumed", {**table, "rounds": 2})
    run(tmp_path / "resumed", table)
    assert digest(tmp_path / "resumed") == digest(tmp_path / "whole")


def test_a_save_takes_no_copy_of_it_while_rounds_go_on(tmp_path: Path) -> None:
    """The checkpoint has the state of its round, though the next rounds change every client while it is written."""
    table = {**SCAFFOLD, "per_round": 23}
    run(tmp_path / "whole", {**table, "rounds": 2})
    rounds = start(tmp_path / "saved", table)
    rounds.checkpoints.start_from(None)
    rounds._prepare(None)
    rounds._config_hash, rounds._numerics = rounds.base_config.hash(), rounds.base_config.numerics()
    train(rounds, 2)
    before = {name: values.clone() for name, values in rounds.server.client_state.items()}
    rounds._save()
    train(rounds, 2)
    rounds.checkpoints.wait()
    assert digest(tmp_path / "saved") == digest(tmp_path / "whole")
    state_bytes = sum(values.nbytes for values in before.values())
    assert rounds.checkpoints.staging.bytes < state_bytes
    assert all(not torch.equal(rounds.server.client_state[name], values) for name, values in before.items())


def _deferred(rounds: Rounds, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return how many clients' new rows are deferred after each chunk."""
    found: list[int] = []
    put = ClientState.put

    def watched(state: ClientState, clients: Any, values: Any, *, is_certain: bool) -> None:
        put(state, clients, values, is_certain=is_certain)
        found.append(sum(len(some) for some, _ in state._deferred))

    monkeypatch.setattr(ClientState, "put", watched)
    return found


def test_rows_are_deferred_only_until_the_round_is_certain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = {**SCAFFOLD, "per_round": 23, "pace": "deadline", "deadline": {"quantile": 1.0, "quorum": 0.5}}
    rounds = ready(tmp_path, table)
    deferred = _deferred(rounds, monkeypatch)
    train(rounds)
    assert deferred[-1] == 0
    assert 0 < max(deferred) < 12


@pytest.mark.parametrize("more", [{}, {"algorithm": "ditto", "aggregation": "median"}], ids=["mean", "median"])
def test_a_round_without_a_quorum_changes_nothing(more: dict[str, Any], tmp_path: Path) -> None:
    rounds = ready(tmp_path, {**SCAFFOLD, **more, "pace": "deadline", "deadline": {"quantile": 1.0, "quorum": 0.9}})
    train(rounds)
    before = {name: values.clone() for name, values in rounds.server.client_state.items()}
    answered = rounds.work._compute

    def breaking(*arguments: Any, **options: Any) -> ClientUpdates:
        sent = answered(*arguments, **options)
        sent.values["delta"][np.flatnonzero(sent.clients % 3 == 0)] = torch.nan
        return sent

    rounds.work._compute = breaking  # type: ignore[method-assign]
    with pytest.raises(QuorumLost):
        train(rounds)
    for name, values in before.items():
        assert torch.equal(rounds.server.client_state[name], values)
