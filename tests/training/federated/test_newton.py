"""Test Newton-type algorithms: one round suffices on a quadratic; on logistic regression they match published rates."""

from __future__ import annotations

import sys
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pytest
import torch

from tests.training.federated import custom_files
from tests.training.federated.in_process import CONVEX, ready, train
from training.federated.controller import QuorumLost
from training.federated.rounds import Rounds

QUADRATIC: dict[str, Any] = {
    **CONVEX,
    "tabular": {"source": "synthetic", "model": "linear", "samples": 300, "features": 6, "held_out": 0},
}
OTHERS = (("orthogonal", 8, 32), ("gaussian", 8, 32), ("gaussian", 15, 25), ("gaussian", 31, 13))
"""Sketches of which every landing need not prove that they are as good as measured."""
NUMBERS = 31
"""Weights of a logistic regression on breast cancer, with the bias."""


def loss(loop: Rounds) -> float:
    """Compute the objective over all data, with its ridge, independently of the engine."""
    task, weights = loop.federation.model.task, loop.server.weights
    rows, targets = task.batch("train", np.arange(task.samples["train"]))
    logits = torch.cat([rows, torch.ones(len(rows), 1)], dim=1).double() @ weights
    ridge = CONVEX["ridge"] / 2 * weights @ weights
    if loop.config.recipe_options()["model"] == "linear":
        return float((logits - targets).square().mean() / 2 + ridge)
    return float(torch.nn.functional.binary_cross_entropy_with_logits(logits, targets.double()) + ridge)


def minimum(folder: Path, table: dict[str, Any]) -> float:
    loop = ready(folder, {**table, "algorithm": "fednewton"})
    train(loop, 12)
    return loss(loop)


@pytest.mark.parametrize(
    ("algorithm", "options"),
    [
        ("fednewton", {}),
        ("fedns", {"rows": 7}),
        ("flens", {"rows": 7}),
        ("flens", {"rows": 7, "line_search": False}),
    ],
)
def test_with_the_whole_hessian_a_quadratic_takes_a_single_round(
    algorithm: str, options: dict[str, Any], tmp_path: Path
) -> None:
    loop = ready(tmp_path, {**QUADRATIC, "algorithm": algorithm, algorithm: options})
    train(loop)
    task = loop.federation.model.task
    rows, targets = task.batch("train", np.arange(task.samples["train"]))
    x = torch.cat([rows, torch.ones(len(rows), 1)], dim=1).double()
    matrix = x.T @ x / len(x) + CONVEX["ridge"] * torch.eye(7, dtype=torch.float64)
    best = torch.linalg.solve(matrix, x.T @ targets.double() / len(x))
    torch.testing.assert_close(loop.server.weights, best, rtol=1e-9, atol=1e-9)


def test_momentum_leaves_a_quadratic_where_it_is_already_best(tmp_path: Path) -> None:
    """A whole Newton step reaches the same minimum from any look-ahead point."""
    loop = ready(tmp_path, {**QUADRATIC, "algorithm": "flens", "flens": {"rows": 7, "line_search": False}})
    train(loop)
    best = loop.server.weights.clone()
    loop.server.memory["previous"] = best + 1.0
    train(loop, 2)
    torch.testing.assert_close(loop.server.weights, best, rtol=1e-9, atol=1e-9)


def test_without_momentum_it_is_fedns(tmp_path: Path) -> None:
    models = []
    for algorithm, options in (("fedns", {"rows": 8}), ("flens", {"rows": 8, "momentum": False})):
        loop = ready(tmp_path / algorithm, {**CONVEX, "algorithm": algorithm, algorithm: options})
        train(loop, 4)
        models.append(loop.server.weights)
    assert torch.equal(*models)


def test_safeguarded_the_loss_never_rises_from_a_small_sketch(tmp_path: Path) -> None:
    loop = ready(tmp_path, {**CONVEX, "algorithm": "flens", "flens": {"rows": 8, "sketch": "gaussian"}})
    losses = [loss(loop)]
    for _ in range(19):
        train(loop)
        losses.append(loss(loop))
    assert all(after <= before + 1e-12 for before, after in zip(losses, losses[1:], strict=False))


LIMITED = """
import torch
from torch import nn

ONLY = None


class Limited(nn.Linear):
    def forward(self, x):
        outputs = super().forward(x)
        return outputs if ONLY is None else torch.where((self.weight == ONLY).all(), outputs, torch.nan)


def model():
    return Limited(4, 3)


def data(client):
    draw = torch.Generator().manual_seed(client)
    x = torch.randn(30, 4, generator=draw, dtype=torch.float64)
    return x, (x[:, 0] > 0).long() + (x[:, 1] > 0).long()
"""
"""A model whose loss is a number at the weights ONLY and nowhere else: each line search along it is lost."""


def test_a_round_that_is_lost_in_its_line_search_changes_no_state(tmp_path: Path) -> None:
    """Else the next attempt would start without momentum."""
    loop = custom_files.ready(tmp_path, LIMITED, algorithm="flens", flens={"momentum": False}, dtype="fp64", ridge=0.01)
    train(loop)
    previous = loop.server.memory["previous"].clone()
    assert not torch.equal(previous, loop.server.weights)
    sys.modules["client"].ONLY = loop.server.weights[:12].view(3, 4).clone()  # type: ignore[attr-defined]
    with pytest.raises(QuorumLost, match="no client answered 'line'"):
        train(loop)
    assert torch.equal(loop.server.memory["previous"], previous)


def test_a_client_sends_its_sketch_its_gradient_and_a_loss(tmp_path: Path) -> None:
    loop = ready(tmp_path, {**CONVEX, "algorithm": "fedns", "fedns": {"rows": 8}})
    sent = loop.work.messages_of(loop.work.training_task, loop.server).up.body
    assert sent == 8 * (8 * NUMBERS + NUMBERS + 1)
    loop = ready(tmp_path / "newton", {**CONVEX, "algorithm": "fednewton"})
    sent = loop.work.messages_of(loop.work.training_task, loop.server).up.body
    assert sent == 8 * (NUMBERS * (NUMBERS + 1) // 2 + NUMBERS + 1)


@pytest.mark.lengthy
@pytest.mark.parametrize(
    ("sketch", "rows", "most"),
    [
        ("orthogonal", 15, 15),
        ("orthogonal", 31, 7),
        *(pytest.param(*row, marks=[pytest.mark.slow, pytest.mark.exhaustive]) for row in OTHERS),
    ],
)
def test_rounds_on_breast_cancer_are_as_few_as_measured(sketch: str, rows: int, most: int, tmp_path: Path) -> None:
    """Median over five seeds of the rounds to f - f* < 1e-8, ten clients."""
    table = {**CONVEX, "clients": 10, "algorithm": "flens", "flens": {"rows": rows, "sketch": sketch}}
    best = minimum(tmp_path / "best", {**CONVEX, "clients": 10})
    taken = []
    for seed in range(5):
        loop = ready(tmp_path / str(seed), {**table, "rounds": 100, "seed": seed})
        while loop.step <= 2 * most:
            train(loop)
            if loss(loop) - best < 1e-8:
                break
        taken.append(loop.step)
    assert median(taken) <= most
