"""Test server optimizers on the mean update: against their formulas, and against torch's optimizers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.training.federated.in_process import DIGITS_FP64, REGRESSION, Federation
from tests.training.federated.quadratic import mean, quadratics, together

STEPS, RATE = 2, 0.05
BETA1, BETA2, TAU, SERVER = 0.8, 0.9, 0.05, 0.2
SECOND: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "fedadam": lambda v, delta: BETA2 * v + (1 - BETA2) * delta**2,
    "fedyogi": lambda v, delta: v - (1 - BETA2) * delta**2 * torch.sign(v - delta**2),
    "fedadagrad": lambda v, delta: v + delta**2,
}


def delta_at(federation: Federation, w: Tensor) -> Tensor:
    """The mean update, by hand."""
    ends = [quadratic.descended(w, STEPS, RATE) for quadratic in quadratics(federation)]
    return mean(ends, federation.divided.sizes) - w


def test_momentum_is_hsus(tmp_path: Path) -> None:
    options = {"learning_rate": SERVER, "momentum": 0.7}
    federation = Federation(tmp_path, "fedavgm", REGRESSION, epochs=STEPS, options=options)
    w = federation.model
    velocity = torch.zeros_like(w)
    for _ in range(4):
        velocity = 0.7 * velocity + delta_at(federation, w)
        w = w + SERVER * velocity
    torch.testing.assert_close(federation.go(4), w, rtol=0, atol=1e-12)


def test_without_momentum_it_is_fedavg(tmp_path: Path) -> None:
    plain = Federation(tmp_path, "fedavg", DIGITS_FP64, dtype="fp32")
    server = Federation(tmp_path, "fedavgm", DIGITS_FP64, dtype="fp32", options={"learning_rate": 1.0, "momentum": 0.0})
    assert torch.equal(server.go(3), plain.go(3))


def test_a_single_local_step_is_synchronous_sgd(tmp_path: Path) -> None:
    """The clients' rate and the server's momentum equal torch's optimizer on all their data."""
    options = {"learning_rate": 1.0, "momentum": 0.9}
    federation = Federation(tmp_path, "fedavgm", REGRESSION, epochs=None, local_steps=1, options=options)
    w, whole = federation.model, together(quadratics(federation), federation.divided.sizes)
    sgd = torch.optim.SGD([w], lr=RATE, momentum=0.9)
    for _ in range(5):
        w.grad = whole.gradient(w)
        sgd.step()
    torch.testing.assert_close(federation.go(5), w, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", SECOND)
def test_adaptive_steps_are_the_papers(name: str, tmp_path: Path) -> None:
    options = {"learning_rate": SERVER, "beta1": BETA1, "tau": TAU}
    if name != "fedadagrad":
        options["beta2"] = BETA2
    federation = Federation(tmp_path, name, REGRESSION, epochs=STEPS, options=options)
    w = federation.model
    m, v = torch.zeros_like(w), torch.full_like(w, TAU**2)
    for _ in range(6):
        delta = delta_at(federation, w)
        m, v = BETA1 * m + (1 - BETA1) * delta, SECOND[name](v, delta)
        w = w + SERVER * m / (v.sqrt() + TAU)
    torch.testing.assert_close(federation.go(6), w, rtol=0, atol=1e-12)


def test_what_the_server_remembers_need_not_travel(tmp_path: Path) -> None:
    plain, adam = (Federation(tmp_path, name, DIGITS_FP64, dtype="fp32") for name in ("fedavg", "fedadam"))
    assert adam.messages == plain.messages
    adam.round()
    assert {name: value.dtype for name, value in adam.server.memory.items()} == {
        "first": torch.float64,
        "second": torch.float64,
    }


@pytest.mark.parametrize(("steps", "weights"), [(1, "samples"), (3, "samples"), (1, "equal")])
def test_diloco_is_adamw_inside_and_nesterov_outside(steps: int, weights: str, tmp_path: Path) -> None:
    inner = {"beta1": 0.8, "beta2": 0.95, "epsilon": 1e-6, "weight_decay": 0.2}
    options = {**inner, "outer_learning_rate": 0.6, "outer_momentum": 0.85, "weights": weights}
    federation = Federation(tmp_path, "diloco", REGRESSION, epochs=steps, options=options)
    outer = federation.model
    far = torch.optim.SGD([outer], lr=0.6, momentum=0.85, nesterov=True)
    parts, models = quadratics(federation), [outer.clone() for _ in range(4)]
    near = [torch.optim.AdamW([w], lr=RATE, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.2) for w in models]
    for _ in range(3):
        for quadratic, w, optimizer in zip(parts, models, near, strict=True):
            w.copy_(outer)  # the moments are those of the round before
            for _ in range(steps):
                w.grad = quadratic.gradient(w)
                optimizer.step()
        outer.grad = outer - mean(models, federation.divided.sizes if weights == "samples" else [1.0] * 4)
        far.step()
    torch.testing.assert_close(federation.go(3), outer, rtol=0, atol=1e-12)


def test_fedbuff_counts_each_update_once_as_in_its_paper(tmp_path: Path) -> None:
    """x + η Σ Δ / K, whatever samples they have."""
    pace = {"pace": "asynchronous", "asynchronous": {"buffer": 4}}
    options = {"weights": "equal", "learning_rate": 0.5}
    federation = Federation(tmp_path, "fedbuff", REGRESSION, options=options, **pace)
    x = federation.model
    models = [quadratic.descended(x, 1, RATE) for quadratic in quadratics(federation)]
    torch.testing.assert_close(federation.go(1), x / 2 + mean(models, [1.0] * 4) / 2, rtol=0, atol=1e-12)


def test_fedasync_holds_clients_near_what_they_were_sent(tmp_path: Path) -> None:
    """A step descends f(w) + ρ/2 ‖w - x‖²; all models are fresh in the first round."""
    pace = {"pace": "asynchronous", "asynchronous": {"buffer": 4}}
    options = {"proximal": 2.0, "mixing": 0.5}
    federation = Federation(tmp_path, "fedasync", REGRESSION, epochs=3, options=options, **pace)
    x, models = federation.model, []
    for quadratic in quadratics(federation):
        w = x
        for _ in range(3):
            w = w - RATE * (quadratic.gradient(w) + 2.0 * (w - x))
        models.append(w)
    found = x / 2 + mean(models, federation.divided.sizes) / 2
    torch.testing.assert_close(federation.go(1), found, rtol=0, atol=1e-12)
