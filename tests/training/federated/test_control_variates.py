"""Test that the server's sum equals what clients keep, whoever is late, failed or unselected (SCAFFOLD, FedDyn)."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.examples import examples
from tests.training.federated.built_in import built_in
from tests.training.federated.in_process import REGRESSION, ready, train
from training.config import choices
from training.federated import sums
from training.federated.client_failures import ClientsFailed
from training.federated.client_tasks import ClientUpdates
from training.federated.controller import QuorumLost
from training.federated.rounds import Rounds
from training.federation import config_checks
from training.federation.config import FOLDERS, parse

CLIENTS = 8
STATE_NAMES = {"scaffold": ("control", "change", 1.0), "feddyn": ("gradient", "delta", -0.1)}
"""By algorithm: what client and server keep, and which part of an update changes it how much."""
PACES: list[dict[str, Any]] = [
    {"pace": "rounds"},
    {"pace": "deadline"},
    {"pace": "deadline", "deadline": {"quantile": 0.3, "quorum": 0.2, "late_exponent": 2.0}},
    {"pace": "deadline", "deadline": {"quantile": 0.3, "quorum": 0.2, "late": "drop"}},
    {"pace": "deadline", "deadline": {"quantile": 0.5, "quorum": 0.2, "late_exponent": 0.0}},
    {"pace": "asynchronous", "asynchronous": {"buffer": 2}},
]
LIMIT = 1e-13


def drift(rounds: Rounds) -> Tensor:
    """Return the server's control less the mean of the clients', which are ahead of it by what is on its way."""
    state, part, factor = STATE_NAMES[rounds.config.algorithm]
    server = rounds.server
    sizes = rounds.work.sizes_of(rounds.work.training_task, server)
    coming = factor * sums.split(server.pending.rows, sizes)[part].sum(dim=0) / CLIENTS
    return server.memory[state] + coming - server.client_state[state].mean(dim=0)


def with_faults(rounds: Rounds, seed: int) -> None:
    """Run rounds in which a third of the clients raise, and as many send values that are not finite."""
    run = rounds.work.run

    def faulty(chunk: Any, round_: int, *arguments: Any, **options: Any) -> ClientUpdates:
        sent = run(chunk, round_, *arguments, **options)
        draw = np.random.RandomState(seed + round_).random_sample(CLIENTS)[chunk.clients]
        sent.failed |= dict.fromkeys(chunk.clients[draw < 1 / 3].tolist(), "Traceback")
        is_nan = torch.from_numpy(draw > 2 / 3)[:, None]
        sent.values = {name: torch.where(is_nan, torch.nan, value) for name, value in sent.values.items()}
        return sent

    rounds.work.run = faulty  # type: ignore[method-assign]


def resumed(folder: Path, run: dict[str, Any], before: Rounds | None) -> Rounds:
    """The next attempt, with what a checkpoint of the one before holds."""
    rounds = ready(folder, run)
    if before is not None:
        rounds.step = before.step
        rounds.server.load_state_dict(before.server.state_dict())
        state = before.server.state()
        for part, tensors in rounds.server.state().items():
            for name, tensor in tensors.items():
                tensor.copy_(state[part][name])
    return rounds


@given(
    algorithm=st.sampled_from(sorted(STATE_NAMES)),
    paces=st.lists(st.sampled_from(PACES), min_size=1, max_size=3),
    selection=st.sampled_from(built_in("selection")),
    per_round=st.integers(2, CLIENTS),
    fails=st.booleans(),
    seed=st.integers(0, 1000),
)
@example(algorithm="scaffold", paces=PACES[1:2], selection="uniform", per_round=8, fails=False, seed=0)
@example(algorithm="feddyn", paces=PACES[1:2], selection="uniform", per_round=8, fails=False, seed=0)
@example(algorithm="scaffold", paces=[PACES[2], PACES[0]], selection="uniform", per_round=8, fails=False, seed=0)
@settings(max_examples=examples(32), deadline=None, phases=[Phase.explicit, Phase.reuse, Phase.generate])
def test_the_server_s_control_is_the_mean_of_the_clients(
    algorithm: str, paces: list[dict[str, Any]], selection: str, per_round: int, fails: bool, seed: int
) -> None:
    """This holds with every pace and selection, and from one round to the next over a resume."""
    table = {**REGRESSION, "clients": CLIENTS, "rounds": 1000, "seed": seed, "learning_rate": 0.2, "epochs": 3}
    table |= {"algorithm": algorithm, "selection": selection, "per_round": per_round}
    rounds: Rounds | None = None
    with tempfile.TemporaryDirectory() as folder:
        for number, pace in enumerate(paces):
            rounds = resumed(Path(folder) / str(number), {**table, **pace}, rounds)
            if fails:
                with_faults(rounds, seed)
            for _ in range(4):
                try:
                    train(rounds)
                except (ClientsFailed, QuorumLost):  # the run ends, and leaves things as they were
                    break
                finally:
                    assert drift(rounds).abs().max() < LIMIT
        assert rounds is not None
        if not fails and selection == "uniform":
            assert rounds.server.memory[STATE_NAMES[algorithm][0]].abs().max() > 1e3 * LIMIT


def test_what_is_under_way_counts_in_the_first_round_of_a_pace_that_waits(tmp_path: Path) -> None:
    table = {**REGRESSION, "clients": CLIENTS, "rounds": 1000, "algorithm": "scaffold"}
    late = ready(tmp_path / "late", {**table, **PACES[2]})
    train(late, 2)
    under_way = late.server.pending.clients.tolist()
    assert under_way
    rounds = resumed(tmp_path / "waits", table, late)
    (report,) = train(rounds)
    assert set(under_way) < set(report.clients.tolist())
    assert sorted(report.clients.tolist()) == list(range(CLIENTS))
    assert not len(rounds.server.pending.clients)


@pytest.mark.parametrize(
    ("table", "field"),
    [({"aggregation": name}, "aggregation") for name in choices.names(FOLDERS["aggregation"]) if name != "mean"]
    + [({"filters": [name]}, "filters") for name in choices.names(FOLDERS["filters"])],
)
def test_feddyn_is_refused_where_the_server_gets_something_else_than_its_clients_keep(
    table: dict[str, Any], field: str
) -> None:
    found = list(config_checks.problems(parse({"algorithm": "feddyn", "clients": 12, **table}), 1))
    assert [problem.field for problem in found] == [field]
    assert "scaffold" in found[0].message or "fedavg" in found[0].message
