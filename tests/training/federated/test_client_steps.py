"""Test local steps of clients: learning rate by round, momentum and weight decay, against plain arithmetic."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.training.federated.custom_files import ALGORITHM, LINEAR, ready
from tests.training.federated.in_process import (
    DIGITS,
    DIGITS_FP64,
    REGRESSION,
    Federation,
    RecordingReporter,
    digest,
    run,
    train,
)
from tests.training.federated.quadratic import mean, quadratics, together
from training.config import choices
from training.config.base import ConfigError
from training.federation import config, config_checks, parts
from training.federation.config import FOLDERS

SCHEDULES: dict[str, tuple[dict[str, Any], list[float]]] = {
    "constant": ({}, [1, 1, 1, 1, 1]),
    "step": ({"every": 2, "gamma": 0.1}, [1, 1, 0.1, 0.1, 0.01]),
    "exponential": ({"decay": 0.5}, [1, 0.5, 0.25, 0.125, 0.0625]),
    "cosine": ({"over": 4, "last": 0.2}, [1, 0.6 + 0.4 * math.sqrt(0.5), 0.6, 0.6 - 0.4 * math.sqrt(0.5), 0.2]),
}
SGD = {"client_momentum": 0.9, "client_weight_decay": 0.05}


class TestSchedule:
    def test_all_are_tested(self) -> None:
        assert sorted(SCHEDULES) == choices.names(FOLDERS["client_lr_schedule"])

    @pytest.mark.parametrize("name", SCHEDULES)
    def test_a_round_s_rate_is_its_formula(self, name: str, tmp_path: Path) -> None:
        options, factors = SCHEDULES[name]
        given = {"client_lr_schedule": name} | ({name: options} if options else {})
        federation = Federation(tmp_path, "fedavg", REGRESSION, **given)
        whole, w = together(quadratics(federation), federation.divided.sizes), federation.model
        for factor in factors:
            w = whole.descended(w, 1, 0.05 * factor)
            torch.testing.assert_close(federation.go(), w, rtol=0, atol=1e-12)

    def test_cosine_without_a_length_ends_with_the_run(self) -> None:
        factor = parts.learning_rate("cosine").factor
        assert [factor(round_, 100) for round_ in (1, 51, 101, 400)] == pytest.approx([1, 0.505, 0.01, 0.01])

    def test_a_rate_never_becomes_zero(self, tmp_path: Path) -> None:
        given = {"client_lr_schedule": "exponential", "exponential": {"decay": 1e-6}}
        federation = Federation(tmp_path, "scaffold", REGRESSION, **given)
        assert federation.work.sgd(1000).learning_rate == pytest.approx(0.05e-12)
        assert torch.isfinite(federation.go(5)).all()

    def test_it_is_a_series_and_resumes_to_the_same_bits(self, tmp_path: Path) -> None:
        table = {
            **DIGITS,
            "rounds": 4,
            "client_lr_schedule": "step",
            "step": {"every": 2},
            **SGD,
            "checkpoint_every": 2,
        }
        reporter = RecordingReporter()
        run(tmp_path / "whole", table, reporter=reporter)
        assert reporter.series["client_learning_rate"] == pytest.approx({1: 0.3, 2: 0.3, 3: 0.15, 4: 0.15})
        run(tmp_path / "parts", {**table, "rounds": 2})
        run(tmp_path / "parts", table)
        assert digest(tmp_path / "parts") == digest(tmp_path / "whole")


def by_torch(start: Tensor, gradient: Any, steps: int, rate: float) -> Tensor:
    """Return where torch.optim.SGD leads."""
    w = torch.nn.Parameter(start.clone())
    optimizer = torch.optim.SGD([w], lr=rate, momentum=0.9, weight_decay=0.05)
    for _ in range(steps):
        w.grad = gradient(w.detach())
        optimizer.step()
    return w.detach()


class TestMomentum:
    def test_fedavg_s_clients_step_as_torch_s_sgd(self, tmp_path: Path) -> None:
        """Velocities start afresh in each round: a retained velocity would lead elsewhere in the second."""
        federation = Federation(tmp_path, "fedavg", REGRESSION, epochs=4, **SGD)
        w = federation.model
        for _ in range(2):
            ends = [by_torch(w, quadratic.gradient, 4, 0.05) for quadratic in quadratics(federation)]
            w = mean(ends, federation.divided.sizes)
        torch.testing.assert_close(federation.go(2), w, rtol=0, atol=1e-12)

    def test_fedprox_s_term_is_part_of_the_direction(self, tmp_path: Path) -> None:
        federation = Federation(tmp_path, "fedprox", REGRESSION, epochs=4, options={"mu": 0.7}, **SGD)
        w, found = federation.model, []
        for quadratic in quadratics(federation):

            def proximal(v: Tensor, quadratic: Any = quadratic) -> Tensor:
                return quadratic.gradient(v) + 0.7 * (v - w)

            found.append(by_torch(w, proximal, 4, 0.05))
        torch.testing.assert_close(federation.go(), mean(found, federation.divided.sizes), rtol=0, atol=1e-12)

    def test_fednova_divides_by_the_weights_of_the_gradients(self, tmp_path: Path) -> None:
        """Clients that only differ in steps: of one gradient g everywhere, each normalised update is −η · g."""
        federation = Federation(tmp_path, "fednova", REGRESSION, batch=10, client_momentum=0.9)
        sgd = federation.work.sgd(1)
        for steps in (1, 2, 7):
            velocity = total = 0.0
            for _ in range(steps):
                velocity = 0.9 * velocity + 1
                total += velocity
            assert sgd.normalizer(steps) == pytest.approx(total)
        assert torch.isfinite(federation.go(3)).all()

    @pytest.mark.parametrize("name", ["fedavg", "feddyn", "ditto", "moon", "fednova", "fedper", "gossip"])
    def test_stacked_and_single_clients_agree(self, name: str, tmp_path: Path) -> None:
        ends = []
        for alone in ("", "forced"):
            federation = Federation(tmp_path, name, DIGITS_FP64, **SGD)
            federation.work.unstacked_reason = alone
            ends.append(federation.go(2))
        torch.testing.assert_close(ends[0], ends[1], rtol=0, atol=1e-10)

    def test_weight_decay_without_momentum_is_a_ridge(self, tmp_path: Path) -> None:
        decayed = Federation(tmp_path, "scaffold", REGRESSION, epochs=3, client_weight_decay=0.2)
        ridged = Federation(tmp_path, "scaffold", REGRESSION, epochs=3, ridge=0.2)
        torch.testing.assert_close(decayed.go(3), ridged.go(3), rtol=0, atol=1e-12)

    @pytest.mark.parametrize(
        ("algorithm", "refused"),
        [
            ("fedavg", set()),
            ("feddyn", set()),
            ("fednova", set()),
            ("scaffold", {"client_momentum"}),
            ("qfedavg", {"client_momentum"}),
            ("diloco", set(SGD)),
            ("fedtail", set(SGD)),
        ],
    )
    def test_where_a_rule_cannot_take_it_it_is_refused(self, algorithm: str, refused: set[str]) -> None:
        parsed = config.parse({"clients": 12, "algorithm": algorithm, **SGD})
        assert {problem.field for problem in config_checks.problems(parsed, 1)} == refused

    def test_who_would_ignore_it_is_refused(self, tmp_path: Path) -> None:
        by_hand = "SENT = {'delta': 'samples'}\n\n\ndef train(client):\n"
        by_hand += "    return {'delta': -client.learning_rate * client.gradient(client.model, 0)}\n\n\n" + ALGORITHM
        with pytest.raises(ConfigError, match=r"run\.client_momentum: is 0\.9, but own never calls client\.descend"):
            ready(tmp_path / "algorithm", LINEAR, by_hand, recipe="client", algorithm="own", client_momentum=0.9)
        client_file = LINEAR + "\n\ndef train(model, batches, learning_rate):\n    pass\n"
        with pytest.raises(ConfigError, match=r"run\.client_weight_decay: is 0\.1, but clients have a train\(\)"):
            ready(tmp_path / "client", client_file, client_weight_decay=0.1)


class TestCustomTrain:
    def test_is_given_client_round_and_rate_where_it_takes_them(self, tmp_path: Path) -> None:
        source = "\n\ndef train(model, batches, learning_rate, *, client, round):\n"
        source += "    nn.init.constant_(model.weight, learning_rate)\n    nn.init.constant_(model.bias, client)\n"
        source += "    return float(100 * client + round)\n"
        loop = ready(tmp_path, LINEAR + source, client_lr_schedule="exponential", exponential={"decay": 0.5})
        train(loop, 3)
        assert loop.server.losses.tolist() == [3, 103, 203]
        assert torch.allclose(loop.server.weights[:12], torch.full((12,), 0.3 * 0.25))
        assert torch.allclose(loop.server.weights[12:], torch.full((3,), (0 * 5 + 1 * 10 + 2 * 15) / 30))

    @pytest.mark.parametrize("arguments", ["", ", client=None", ", *, round=None", ", **more", ", *, decay=1.0"])
    def test_or_not_where_it_does_not(self, arguments: str, tmp_path: Path) -> None:
        source = f"\n\ndef train(model, batches, learning_rate{arguments}):\n    return 1.0\n"
        train(loop := ready(tmp_path, LINEAR + source))
        assert loop.server.losses.tolist() == [1, 1, 1]

    def test_an_option_of_that_name_stays_an_option(self, tmp_path: Path) -> None:
        source = "\n\ndef train(model, batches, learning_rate, *, round=7):\n    return float(round)\n"
        train(loop := ready(tmp_path, LINEAR + source, client={"round": 5}))
        assert loop.server.losses.tolist() == [5, 5, 5]
