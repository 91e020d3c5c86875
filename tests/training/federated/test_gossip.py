"""Test gossip: mixing keeps the mean and contracts clients at the rate of the matrix's second eigenvalue."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.training.federated.in_process import accuracies, assert_same_state, ready, resumed, train
from training.federated.algorithms.gossip import adjacency_matrix, mix_models, mixing_matrix
from training.federation.config import parse
from training.federation.config_checks import problems

RUN: dict[str, Any] = {
    "algorithm": "gossip",
    "clients": 6,
    "split": "dirichlet",
    "learning_rate": 0.3,
    "validate_every": 0,
    "options": {"dirichlet": {"alpha": 1.0}},
}
REGRESSION: dict[str, Any] = {
    "clients": 10,
    "local_steps": 1,
    "dtype": "fp64",
    "options": {"tabular": {"source": "synthetic", "model": "linear", "samples": 1200}},
}
"""1,000 rows to train on: each client has a hundred."""
DEGREES = {"ring": 2, "torus": 4, "complete": 11, "random": 6}


def matrix(topology: str, clients: int = 12) -> np.ndarray:
    return mixing_matrix(adjacency_matrix(topology, clients, 6, np.random.RandomState(5)))


def models(clients: int = 12) -> Tensor:
    return torch.randn(clients, 40, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


def deviation(models: Tensor) -> float:
    return float((models - models.mean(0)).norm())


@pytest.mark.parametrize("topology", DEGREES)
class TestMixing:
    def test_doubly_stochastic(self, topology: str) -> None:
        found = matrix(topology)
        assert (found >= 0).all()
        assert np.array_equal(found, found.T)
        assert np.abs(found.sum(0) - 1).max() < 1e-15
        assert ((found > 0).sum(0) == DEGREES[topology] + 1).all()

    def test_the_mean_stays(self, topology: str) -> None:
        before = models()
        after = mix_models(before, torch.from_numpy(matrix(topology)))
        assert not torch.allclose(before, after)
        assert float((after.mean(0) - before.mean(0)).abs().max()) < 1e-12

    def test_contraction(self, topology: str) -> None:
        weights = torch.from_numpy(matrix(topology))
        second = float(torch.linalg.eigvalsh(weights).abs().sort().values[-2])
        now = models() - models().mean(0)
        next_ = mix_models(now, weights)
        assert deviation(next_) <= second * deviation(now) + 1e-12
        if topology == "complete":
            assert deviation(next_) < 1e-12
            return
        for _ in range(60):
            now, next_ = next_, mix_models(next_, weights)
        assert deviation(next_) / deviation(now) == pytest.approx(second, rel=1e-4)


def test_a_ring_s_second_eigenvalue() -> None:
    found = np.linalg.eigvalsh(matrix("ring"))[-2]
    assert found == pytest.approx((1 + 2 * np.cos(2 * np.pi / 12)) / 3)


@pytest.mark.parametrize(("clients", "degree"), [(2, 1), (3, 2), (4, 2), (6, 3), (9, 4), (10, 3), (12, 4)])
def test_a_torus_is_as_square_as_can_be(clients: int, degree: int) -> None:
    found = adjacency_matrix("torus", clients, 0, np.random.RandomState(0))
    assert (found.sum(0) == degree).all()
    assert found.max() == 1


def test_random_neighbours_are_others_each_time() -> None:
    first, other = (adjacency_matrix("random", 40, 4, np.random.RandomState(seed)) for seed in (1, 2))
    assert not np.array_equal(first, other)


class TestRounds:
    def test_by_hand(self, tmp_path: Path) -> None:
        """The result is W (x - η g), with g from each client's model and batch."""
        rounds = ready(tmp_path, {**REGRESSION, "algorithm": "gossip", "batch": 1000})
        server, divided, task = rounds.server, rounds.federation.divided, rounds.federation.model.task
        server.client_state["model"] = before = models(10)[:, :17].clone()
        expected = before.clone()
        for client, ids in enumerate(divided.train):
            rows, values = task.batch("train", ids)
            rows = torch.cat([rows, torch.ones(len(rows), 1)], dim=1).double()
            expected[client] -= 0.1 * rows.T @ (rows @ before[client] - values) / len(rows)
        train(rounds)
        expected = torch.from_numpy(matrix("ring", 10)) @ expected
        assert torch.allclose(server.client_state["model"], expected, rtol=0, atol=1e-12)
        assert torch.allclose(server.weights, expected.mean(0), rtol=0, atol=1e-12)

    def test_the_mean_stays_where_nobody_moves(self, tmp_path: Path) -> None:
        rounds = ready(tmp_path, {**REGRESSION, "algorithm": "gossip", "learning_rate": 1e-30})
        rounds.server.client_state["model"] = models(10)[:, :17].clone()
        mean = rounds.server.client_state["model"].mean(0)
        train(rounds, 3)
        assert float((rounds.server.weights - mean).abs().max()) < 1e-12
        assert float((rounds.server.client_state["model"].mean(0) - mean).abs().max()) < 1e-12

    def test_all_with_all_is_fedavg(self, tmp_path: Path) -> None:
        complete = {"gossip": {"topology": "complete"}, **REGRESSION["options"]}
        gossip = ready(tmp_path / "gossip", {**REGRESSION, "algorithm": "gossip", "options": complete})
        fedavg = ready(tmp_path / "fedavg", {**REGRESSION, "algorithm": "fedavg"})
        train(gossip, 4)
        train(fedavg, 4)
        assert torch.allclose(gossip.server.weights, fedavg.server.weights, rtol=0, atol=1e-13)
        assert float(gossip.server.weights.norm()) > 0.1

    @pytest.mark.parametrize(("topology", "degree"), [("ring", 2), ("torus", 3), ("complete", 5), ("random", 4)])
    def test_bytes_go_between_neighbours(self, tmp_path: Path, topology: str, degree: int) -> None:
        options = {**RUN["options"], "gossip": {"topology": topology}}
        reports = train(ready(tmp_path, {**RUN, "options": options}))[0]
        fedavg = train(ready(tmp_path / "fedavg", {**RUN, "algorithm": "fedavg"}))[0]
        assert reports.traffic.bytes_up == degree * fedavg.traffic.bytes_down
        assert reports.traffic.bytes_down == 0

    @pytest.mark.parametrize("batch_norm", [False, True])
    def test_it_learns(self, tmp_path: Path, batch_norm: bool) -> None:
        options = {**RUN["options"], "tabular": {"batch_norm": batch_norm}}
        rounds = ready(tmp_path, {**RUN, "options": options})
        found = accuracies(rounds, 5)
        assert found[5] > 0.7 > 0.3 > found[0]
        judged = rounds.evaluator.evaluate(rounds.server, should_continue=lambda: True)
        assert judged is not None
        client_accuracy = float(np.nanmean(judged.by_client["accuracy"]))
        assert client_accuracy > 0.7
        assert client_accuracy != pytest.approx(judged.means["accuracy"], abs=1e-6), "clients are judged by their own"

    @pytest.mark.parametrize("topology", ["ring", "random"])
    def test_resumed_bit_for_bit(self, tmp_path: Path, topology: str) -> None:
        assert_same_state(*resumed(tmp_path, {**RUN, "options": {**RUN["options"], "gossip": {"topology": topology}}}))


@pytest.mark.parametrize(
    ("changed", "field"),
    [
        ({"per_round": 3}, "per_round"),
        ({"pace": "deadline"}, "pace"),
        ({"clients": 1}, "clients"),
        ({"clients": 7, "options": {"gossip": {"topology": "torus"}}}, "clients"),
        ({"options": {"gossip": {"topology": "random", "degree": 3}}}, "gossip.degree"),
        ({"options": {"gossip": {"topology": "random", "degree": 6}}}, "gossip.degree"),
    ],
)
def test_what_it_can_t_work_with(changed: dict[str, Any], field: str) -> None:
    found = list(problems(parse({"recipe": "tabular", "algorithm": "gossip", "clients": 6, **changed}), 1))
    assert field in [problem.field for problem in found]


def test_by_itself_it_is_fine() -> None:
    assert not list(problems(parse({**RUN, "recipe": "tabular"}), 1))
