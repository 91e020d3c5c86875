"""Test personalised accuracy: clients are evaluated after steps on their own data, without effect on training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.training.federated.custom_files import LINEAR, ready
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
from tests.training.federated.quadratic import quadratics
from training.federated.evaluation import Evaluation
from training.federated.rounds import Rounds


def judged(loop: Rounds) -> Evaluation:
    found = loop.evaluator.evaluate(loop.server, should_continue=lambda: True, round_=loop.step)
    assert found is not None
    return found


@pytest.mark.parametrize("alone", ["", "forced"])
def test_each_client_is_evaluated_after_its_steps(alone: str, tmp_path: Path) -> None:
    tabular = {**REGRESSION["tabular"], "held_out": 4}
    chosen: dict[str, Any] = {"tabular": tabular, "finetune_steps": 3, "client_lr_schedule": "exponential"}
    federation = Federation(tmp_path, "fedavg", REGRESSION, exponential={"decay": 0.5}, **chosen)
    federation.work.unstacked_reason, federation.loop.evaluator._is_unstacked = alone, bool(alone)
    federation.go(2)
    found, task = judged(federation.loop), federation.loop.federation.model.task
    for client, quadratic in enumerate(quadratics(federation)):
        w = quadratic.descended(federation.model, 3, 0.05 / 2)
        rows, values = task.batch("validation", federation.divided.validation[client])
        if len(rows):
            loss = (rows.double() @ w[:-1] + w[-1] - values).square().mean() / 2
            assert found.finetuned["loss"][client] == pytest.approx(float(loss), abs=1e-10)
            assert found.finetuned["loss"][client] != found.by_client["loss"][client]


@pytest.mark.parametrize("name", ["fedavg", "fedper", "ditto", "gossip", "scaffold"])
def test_stacked_and_single_clients_agree_whatever_clients_store(name: str, tmp_path: Path) -> None:
    federation = Federation(tmp_path, name, DIGITS_FP64, finetune_steps=5)
    federation.go(2)
    first = judged(federation.loop)
    federation.work.unstacked_reason, federation.loop.evaluator._is_unstacked = "forced", True
    second = judged(federation.loop)
    torch.testing.assert_close(first.finetuned["loss"], second.finetuned["loss"], rtol=0, atol=1e-10)
    assert first.finetuned_means["loss"] < first.means["loss"]


def test_training_goes_on_as_without_it(tmp_path: Path) -> None:
    table = {**DIGITS, "rounds": 3, "tabular": {"hidden": 16, "batch_norm": True}}
    reporter = RecordingReporter()
    run(tmp_path / "without", table)
    run(tmp_path / "with", {**table, "finetune_steps": 4}, reporter=reporter)
    assert digest(tmp_path / "with") == digest(tmp_path / "without")
    assert {"finetuned_accuracy", "finetuned_accuracy_min", "finetuned_accuracy_median"} <= reporter.series.keys()
    assert reporter.series["finetuned_accuracy"][3] > reporter.series["accuracy"][3]


def test_custom_clients_are_tuned_and_evaluated_by_custom_functions(tmp_path: Path) -> None:
    source = "\n\ndef train(model, batches, learning_rate, *, client):\n    nn.init.constant_(model.bias, client)\n"
    source += "    return float(len(batches))\n"
    source += "\n\ndef evaluate(model, x, y):\n    return {'accuracy': float(model.bias[0])}\n"
    loop = ready(tmp_path, LINEAR + source, finetune_steps=2)
    train(loop)
    assert judged(loop).finetuned["accuracy"].tolist() == [0, 1, 2]
