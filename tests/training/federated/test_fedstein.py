"""FedStein: shrinking batch statistics loses less than taking them as measured; γ and β never travel."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.training.federated.in_process import accuracies, assert_same_state, ready, resumed, train
from training.federated.algorithms.fedstein import share, shrunk
from training.federation.config import parse
from training.federation.config_checks import problems

RUN = {
    "algorithm": "fedstein",
    "clients": 5,
    "split": "dirichlet",
    "learning_rate": 0.1,
    "validate_every": 0,
    "options": {"tabular": {"batch_norm": True}, "dirichlet": {"alpha": 1.0}},
}


def simulated(channels: int, tries: int = 2000) -> dict[str, float]:
    """The mean squared error of each estimate of channels around 3, each measured with error 1."""
    draw = torch.Generator().manual_seed(1)
    true = 3 + torch.randn(tries, channels, generator=draw, dtype=torch.float64)
    observed = true + torch.randn(tries, channels, generator=draw, dtype=torch.float64)
    to_zero = (1 - (channels - 2) / observed.square().sum(1, keepdim=True)).clamp(min=0) * observed
    lindley = torch.stack([shrunk(row, torch.ones_like(row)) for row in observed])
    estimates = {"measured": observed, "to_zero": to_zero, "lindley": lindley}
    return {name: float((value - true).square().sum(1).mean()) for name, value in estimates.items()}


class TestShrunk:
    def test_risk(self) -> None:
        risk = simulated(64)
        assert risk["measured"] == pytest.approx(64, rel=0.02)
        assert risk["to_zero"] == pytest.approx(58.2, rel=0.02)
        assert risk["lindley"] == pytest.approx(64 - 61 / 2, rel=0.02)  # as the spread is what the errors' is

    def test_four_channels_are_enough(self) -> None:
        risk = simulated(4, tries=4000)
        assert risk["lindley"] < 0.97 * risk["measured"]

    def test_by_hand(self) -> None:
        values, errors = torch.tensor([1.0, 2.0, 3.0, 10.0]), torch.tensor([1.0, 1.0, 1.0, 2.0])
        z = torch.tensor([1.0, 2.0, 3.0, 5.0])  # mean 2.75, squares around it 8.75
        expected = (2.75 + (1 - 1 / 8.75) * (z - 2.75)) * errors
        assert torch.allclose(shrunk(values, errors.square()), expected)

    def test_never_beyond_the_mean(self) -> None:
        values = torch.tensor([1.0, 1.01, 0.99, 1.0])
        assert torch.allclose(shrunk(values, torch.ones(4)), torch.ones(4))


class TestShare:
    def statistics(self, channels: int) -> dict[str, Tensor]:
        draw = torch.Generator().manual_seed(2)
        return {
            "norm.running_mean": torch.randn(channels, generator=draw, dtype=torch.float64),
            "norm.running_var": torch.rand(channels, generator=draw, dtype=torch.float64) + 0.1,
        }

    def test_many_samples_leave_them_as_they_are(self) -> None:
        given = self.statistics(16)
        few, many = share(given, torch.tensor(5.0)), share(given, torch.tensor(1e14))
        for name, value in given.items():
            assert torch.allclose(many[name], value, rtol=1e-10), name
            assert not torch.allclose(few[name], value, rtol=1e-3), name

    def test_variances_by_their_logarithms(self) -> None:
        given = self.statistics(16)
        found = share(given, torch.tensor(41.0))["norm.running_var"]
        assert torch.allclose(found.log(), shrunk(given["norm.running_var"].log(), torch.full((16,), 2 / 40)))

    def test_three_channels_are_too_few(self) -> None:
        given = self.statistics(3)
        assert all(torch.equal(value, given[name]) for name, value in share(given, torch.tensor(5.0)).items())

    def test_a_single_sample_and_a_dead_channel(self) -> None:
        given = {"running_mean": torch.tensor([5.0, 0.0, 1.0, 2.0]), "running_var": torch.tensor([0.0, 0.0, 1.0, 1.0])}
        for found in share(given, torch.tensor(1.0)).values():
            assert torch.isfinite(found).all()


class TestRounds:
    def test_what_travels(self, tmp_path: Path) -> None:
        rounds = ready(tmp_path, RUN)
        model, server = rounds.federation.model, rounds.server
        assert set(model.weights.shared_shapes) == {"hidden.weight", "hidden.bias", "head.weight", "head.bias"}
        assert set(model.statistics.shared_shapes) == {"norm.running_mean", "norm.running_var"}
        before = server.weights[model.weights.shared :].clone()
        train(rounds)
        assert rounds.work.sizes_of(rounds.work.training_task, server) == {
            "delta": 64 * 64 + 64 + 10 * 64 + 10,
            "statistics": 2 * 64,
        }
        assert torch.equal(server.weights[model.weights.shared :], before)
        assert (server.client_state["personal"].std(0) > 0).all(), "each client has its own γ and β"

    def test_the_server_has_the_mean_of_the_estimates(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        sent, run = [], {**RUN, "split": "quantity", "options": {"tabular": {"batch_norm": True}}}
        rounds = ready(tmp_path, run)

        def noting(*given: Tensor) -> object:
            sent.append((given[1], share(*given)))  # type: ignore[arg-type]
            return sent[-1][1]

        object.__setattr__(rounds.federation.model.algorithm, "share", noting)
        train(rounds)
        samples = torch.stack([count for count, _ in sent])
        means = torch.stack([found["norm.running_mean"] for _, found in sent])
        expected = (samples[:, None] * means).sum(0) / samples.sum()
        found = rounds.federation.model.statistics.tensors(rounds.server.statistics)["norm.running_mean"]
        assert torch.allclose(found, expected, atol=1e-6)
        assert len(sent) == 5

    def test_it_learns(self, tmp_path: Path) -> None:
        found = accuracies(ready(tmp_path, RUN), 5)
        assert found[5] > 0.75 > found[1] > found[0]

    def test_resumed_bit_for_bit(self, tmp_path: Path) -> None:
        assert_same_state(*resumed(tmp_path, RUN))


def test_a_model_without_batch_normalisation_is_refused() -> None:
    (problem,) = problems(parse({**RUN, "options": {"dirichlet": {"alpha": 1.0}}}), 1)
    assert problem.field == "algorithm"
    assert "batch_norm = true" in problem.message
