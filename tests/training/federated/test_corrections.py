"""Test algorithms that correct client drift, so that the common optimum is a fixed point: SCAFFOLD, FedDyn."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from tests.training.federated.in_process import REGRESSION, Federation
from tests.training.federated.quadratic import quadratics, together

EVEN = [1.0] * 4
"""Both count every client alike."""
FAR = {**REGRESSION, "split": "iid", "epochs": 10, "learning_rate": 0.2}
"""Clients go as far as they can on their own."""
RATE = REGRESSION["learning_rate"]


def best(federation: Federation) -> Tensor:
    return together(quadratics(federation), EVEN).minimiser


def test_scaffolds_control_is_the_mean_of_all_clients(tmp_path: Path) -> None:
    federation = Federation(tmp_path, "scaffold", REGRESSION, epochs=3, per_round=2)
    everybody: set[int] = set()
    for _ in range(6):
        before = federation.server.client_state["control"].clone()
        selected = federation.round().clients.tolist()
        everybody |= set(selected)
        controls, control = federation.server.client_state["control"], federation.server.memory["control"]
        torch.testing.assert_close(controls.mean(dim=0), control, rtol=0, atol=1e-14)
        rest = [client for client in range(4) if client not in selected]
        assert torch.equal(controls[rest], before[rest])
        assert not torch.equal(controls[selected], before[selected])
    assert everybody == set(range(4))


def test_scaffold_by_hand(tmp_path: Path) -> None:
    federation = Federation(tmp_path, "scaffold", REGRESSION, epochs=3, per_round=2, options={"learning_rate": 0.5})
    parts, x = quadratics(federation), federation.model
    c, controls = torch.zeros_like(x), torch.zeros(4, len(x), dtype=torch.float64)
    for _ in range(5):
        selected = federation.round().clients.tolist()
        ends, fresh = [], controls.clone()
        for client in selected:
            y = x
            for _ in range(3):
                y = y - RATE * (parts[client].gradient(y) - controls[client] + c)
            fresh[client] = controls[client] - c + (x - y) / (3 * RATE)
            ends.append(y)
        x = x + 0.5 * (torch.stack(ends).mean(dim=0) - x)
        c, controls = c + (fresh - controls)[selected].mean(dim=0) * 2 / 4, fresh
    torch.testing.assert_close(federation.model, x, rtol=0, atol=1e-12)


def test_only_scaffolds_control_is_sent_with_the_model(tmp_path: Path) -> None:
    plain, scaffold = (Federation(tmp_path, name, REGRESSION) for name in ("fedavg", "scaffold"))
    numbers = 8 * len(plain.model)
    assert scaffold.messages.up.body - plain.messages.up.body == numbers
    assert scaffold.messages.down.body - plain.messages.down.body == numbers
    assert set(scaffold.messages.down.tensors) - set(plain.messages.down.tensors) == {"server.control"}


def test_fedavg_finds_something_else(tmp_path: Path) -> None:
    """And not for its weights: here clients are of the same size."""
    plain = Federation(tmp_path, "fedavg", FAR)
    assert set(plain.divided.sizes.tolist()) == {15}
    before = plain.go(20)
    torch.testing.assert_close(plain.go(), before, rtol=0, atol=1e-6)
    assert (plain.model - best(plain)).norm() > 0.01


def test_scaffold_finds_what_is_best_for_all(tmp_path: Path) -> None:
    corrected = Federation(tmp_path, "scaffold", FAR)
    torch.testing.assert_close(corrected.go(30), best(corrected), rtol=0, atol=1e-5)


def test_feddyn_finds_what_is_best_for_all(tmp_path: Path) -> None:
    federation = Federation(tmp_path, "feddyn", FAR, per_round=3, options={"alpha": 0.5})
    for _ in range(40):
        federation.round()
        gradients, h = federation.server.client_state["gradient"], federation.server.memory["gradient"]
        torch.testing.assert_close(gradients.mean(dim=0), h, rtol=0, atol=1e-13)
    torch.testing.assert_close(federation.model, best(federation), rtol=0, atol=1e-4)


def test_feddyns_term_is_each_clients_gradient(tmp_path: Path) -> None:
    """Once clients have solved their problem, ∇F(w) − g + α (w − w_t) = 0 makes g ← g − α (w − w_t) = ∇F(w)."""
    alpha = 4.0
    federation = Federation(tmp_path, "feddyn", REGRESSION, epochs=25, learning_rate=0.2, options={"alpha": alpha})
    parts, x = quadratics(federation), federation.model
    gradients, h = torch.zeros(4, len(x), dtype=torch.float64), torch.zeros_like(x)
    proximal = alpha * torch.eye(len(x), dtype=torch.float64)
    for _ in range(3):
        ends = torch.stack(
            [
                torch.linalg.solve(quadratic.a + proximal, quadratic.b + g + alpha * x)
                for quadratic, g in zip(parts, gradients, strict=True)
            ]
        )
        gradients = torch.stack([quadratic.gradient(end) for quadratic, end in zip(parts, ends, strict=True)])
        h = h - alpha * (ends - x).mean(dim=0)
        x = ends.mean(dim=0) - h / alpha
    torch.testing.assert_close(federation.go(3), x, rtol=0, atol=1e-11)
    torch.testing.assert_close(federation.server.client_state["gradient"], gradients, rtol=0, atol=1e-11)
