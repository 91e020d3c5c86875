"""Test averaging algorithms: each against its definition, computed by hand where losses are quadratic."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.func import functional_call
from torch.nn.functional import cosine_similarity, cross_entropy

from tests.training.federated.in_process import DIGITS_FP64, REGRESSION, Federation
from tests.training.federated.quadratic import mean, quadratics, together
from training.config.base import ConfigError
from training.federated.schedule import ClientChunk

NORMALISED = {"tabular": {"hidden": 16, "batch_norm": True}}
LEARNING: dict[str, dict[str, Any]] = {
    "diloco": {"learning_rate": 0.01},
    "ditto": {},
    "fedadagrad": {},
    "fedadam": {},
    "fedavg": {},
    "fedavgm": {},
    "fedbn": NORMALISED,
    "feddyn": {},
    "fednova": {},
    "fedper": {},
    "fedprox": {},
    "fedyogi": {},
    "moon": {},
    "qfedavg": {},
    "scaffold": {},
}


@pytest.mark.parametrize("name", LEARNING)
def test_each_learns_digits(name: str, tmp_path: Path) -> None:
    federation = Federation(tmp_path, name, DIGITS_FP64, dtype="fp32", clients=3, **LEARNING[name])
    before = federation.accuracy()
    federation.go(3)
    assert federation.accuracy() > before + 0.1
    assert bool(federation.work.unstacked_reason) == (name == "fedbn"), federation.work.unstacked_reason


class TestFedAvg:
    def test_a_whole_batch_is_a_step_of_gradient_descent(self, tmp_path: Path) -> None:
        federation = Federation(tmp_path, "fedavg", REGRESSION)
        whole = together(quadratics(federation), federation.divided.sizes)
        expected = whole.descended(federation.model, 5, 0.05)
        torch.testing.assert_close(federation.go(5), expected, rtol=0, atol=1e-12)

    def test_of_a_network_too(self, tmp_path: Path) -> None:
        federation = Federation(tmp_path, "fedavg", DIGITS_FP64, batch=2000)
        model = federation.loop.federation.model
        rows, labels = model.task.batch("train", torch.arange(model.task.samples["train"]).numpy())

        def loss(w: Tensor) -> Tensor:
            return cross_entropy(functional_call(model.task.model, model.weights.tensors(w), (rows,)), labels)

        w = federation.model
        for _ in range(2):
            w = w - 0.3 * torch.func.grad(loss)(w)
        torch.testing.assert_close(federation.go(2), w, rtol=0, atol=1e-12)


class TestFedProx:
    def test_unheld_is_fedavg(self, tmp_path: Path) -> None:
        plain = Federation(tmp_path, "fedavg", DIGITS_FP64, dtype="fp32")
        fedprox = Federation(tmp_path, "fedprox", DIGITS_FP64, dtype="fp32", options={"mu": 0.0})
        assert torch.equal(fedprox.go(2), plain.go(2))

    def test_many_steps_lead_to_the_proximal_point(self, tmp_path: Path) -> None:
        mu = 20.0
        federation = Federation(tmp_path, "fedprox", REGRESSION, epochs=60, learning_rate=0.04, options={"mu": mu})
        start = torch.linspace(-1, 1, 4, dtype=torch.float64)
        federation.put(start)
        proximal = mu * torch.eye(4, dtype=torch.float64)
        points = [
            torch.linalg.solve(quadratic.a + proximal, quadratic.b + mu * start) for quadratic in quadratics(federation)
        ]
        torch.testing.assert_close(federation.go(), mean(points, federation.divided.sizes), rtol=0, atol=1e-12)


class TestFedNova:
    """A client takes as many steps as it has samples, one sample per step."""

    RUN = {**REGRESSION, "batch": 1}

    def drift(self, folder: Path, algorithm: str, rate: float) -> Tensor:
        """Return where a round leads from the best model for all, divided by the clients' learning rate."""
        federation = Federation(folder, algorithm, self.RUN, learning_rate=rate)
        best = together(quadratics(federation), federation.divided.sizes).minimiser
        federation.put(best)
        return (federation.go() - best) / rate

    def test_the_best_model_stays_where_fedavg_leaves_it(self, tmp_path: Path) -> None:
        far, near = (self.drift(tmp_path, "fednova", rate).norm() for rate in (1e-4, 1e-6))
        assert near < far / 90
        assert near < 1e-3
        federation = Federation(tmp_path, "fedavg", self.RUN)
        parts, sizes = quadratics(federation), federation.divided.sizes
        best = together(parts, sizes).minimiser
        bias = -mean([size * part.gradient(best) for size, part in zip(sizes, parts, strict=True)], sizes)
        assert bias.norm() > 1
        torch.testing.assert_close(self.drift(tmp_path, "fedavg", 1e-6), bias, rtol=0, atol=1e-2)

    def test_a_round_is_the_mean_step_times_the_mean_number_of_steps(self, tmp_path: Path) -> None:
        federation = Federation(tmp_path, "fednova", self.RUN)
        sizes, start = federation.divided.sizes, federation.model
        plain = Federation(tmp_path, "fedavg", self.RUN)
        deltas = []
        for client, size in enumerate(sizes.tolist()):
            chunk = ClientChunk(np.array([client]), steps=size, width=1)
            sent = plain.work.run(chunk, 1, plain.work.training_task, plain.server)
            deltas.append(sent.values["delta"][0])
        steps = mean([torch.tensor(float(size)).double() for size in sizes], sizes)
        expected = start + steps * mean([delta / size for delta, size in zip(deltas, sizes, strict=True)], sizes)
        torch.testing.assert_close(federation.go(), expected, rtol=0, atol=1e-12)

    def test_with_equal_steps_it_is_fedavg(self, tmp_path: Path) -> None:
        nova, plain = (Federation(tmp_path, name, REGRESSION, epochs=3) for name in ("fednova", "fedavg"))
        torch.testing.assert_close(nova.go(3), plain.go(3), rtol=0, atol=1e-12)


class TestQFedAvg:
    def test_without_q_it_is_fedavg(self, tmp_path: Path) -> None:
        fair = Federation(tmp_path, "qfedavg", DIGITS_FP64, options={"q": 0.0})
        plain = Federation(tmp_path, "fedavg", DIGITS_FP64)
        torch.testing.assert_close(fair.go(3), plain.go(3), rtol=0, atol=1e-12)

    def test_a_round_is_the_papers(self, tmp_path: Path) -> None:
        q, rate = 2.5, 0.05
        federation = Federation(tmp_path, "qfedavg", REGRESSION, epochs=3, options={"q": q})
        w = torch.linspace(-1, 1, 4, dtype=torch.float64)
        federation.put(w)
        ways, curvatures = [], []
        for quadratic in quadratics(federation):
            way = (w - quadratic.descended(w, 3, rate)) / rate
            ways.append(quadratic.loss(w) ** q * way)
            curvatures.append(q * quadratic.loss(w) ** (q - 1) * way @ way + quadratic.loss(w) ** q / rate)
        sizes = federation.divided.sizes
        expected = w - mean(ways, sizes) / mean(curvatures, sizes)
        torch.testing.assert_close(federation.go(), expected, rtol=0, atol=1e-12)

    def test_the_larger_q_the_more_a_round_is_the_worst_clients(self, tmp_path: Path) -> None:
        alike = []
        for q in (0.0, 5.0, 20.0):
            federation = Federation(tmp_path, "qfedavg", REGRESSION, options={"q": q})
            parts = quadratics(federation)
            before = together(parts, federation.divided.sizes).minimiser + 0.2  # where they disagree
            federation.put(before)
            worst = max(parts, key=lambda part: float(part.loss(before)))
            way = federation.go() - before
            alike.append(float(cosine_similarity(way, -worst.gradient(before), dim=0)))
        assert alike == sorted(alike)
        assert alike[0] < 0.95
        assert alike[-1] > 0.99


class TestMoon:
    def test_unheld_is_fedavg(self, tmp_path: Path) -> None:
        plain = Federation(tmp_path, "fedavg", DIGITS_FP64)
        moon = Federation(tmp_path, "moon", DIGITS_FP64, options={"mu": 0.0})
        assert torch.equal(moon.go(2), plain.go(2))

    def test_two_rounds_by_hand(self, tmp_path: Path) -> None:
        mu, temperature, rate = 2.0, 0.5, 0.3
        federation = Federation(
            tmp_path, "moon", DIGITS_FP64, batch=2000, epochs=2, options={"mu": mu, "temperature": temperature}
        )
        model, owned = federation.loop.federation.model, federation.divided.train
        w = federation.model
        previous = [w] * 5
        for _ in range(2):
            ends = []
            for client in range(5):
                rows, labels = model.task.batch("train", owned[client])
                v = w

                def features_of(w: Tensor, rows: Tensor = rows) -> Tensor:
                    parts = model.weights.tensors(w)
                    return torch.relu(rows @ parts["hidden.weight"].T + parts["hidden.bias"])

                towards, away = features_of(w), features_of(previous[client])
                for _ in range(2):
                    v = v.detach().requires_grad_()
                    parts, features = model.weights.tensors(v), features_of(v)
                    logits = features @ parts["head.weight"].T + parts["head.bias"]
                    near, far = (torch.exp(cosine_similarity(features, z) / temperature) for z in (towards, away))
                    loss = cross_entropy(logits, labels) - mu * torch.log(near / (near + far)).mean()
                    (gradient,) = torch.autograd.grad(loss, v)
                    v = (v - rate * gradient).detach()
                ends.append(v)
            previous, w = ends, mean(ends, federation.divided.sizes)
        torch.testing.assert_close(federation.go(2), w, rtol=0, atol=1e-12)
        torch.testing.assert_close(
            federation.server.client_state["previous"], torch.stack(previous), rtol=0, atol=1e-12
        )


@pytest.mark.parametrize(("name", "run"), [("moon", REGRESSION), ("fedper", REGRESSION), ("fedbn", DIGITS_FP64)])
def test_a_model_without_what_it_is_about_is_refused(name: str, run: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf'run\.algorithm: is "{name}", but the model of tabular has no'):
        Federation(tmp_path, name, run)
