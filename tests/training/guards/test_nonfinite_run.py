"""Test non-finite numbers in whole runs: where each came from, and which rank is at fault."""

from __future__ import annotations

import itertools
import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.training.guards.planted import BATCH, planted_run, sample_at
from tests.training.ranks import TINY, Run
from training.runtime.devices import node_name
from training.runtime.distributed import StepFlags
from training.step.norms import GradientNorm
from training.step.optimizer import local
from training.trainer import Trainer

pytestmark = pytest.mark.slow


def test_an_exchange_that_overflows_is_named(tmp_path: Path) -> None:
    run = planted_run(tmp_path, {"huge": sample_at(20, 5)}, steps=70, communication="fp16")
    incarnation = run.start(2)
    assert incarnation.wait() == [1, 1], incarnation.output()
    (event,) = run.events("guard.nonfinite")
    assert event["what"].endswith("gradient norm inf, but finite on every rank before fp16 exchanged it")


def err_once() -> None:
    """Make the norm NaN once, which no gradient explains: it is finite when it is computed again."""
    norm, calls = GradientNorm.__call__, itertools.count(1)

    def once(self: GradientNorm) -> Tensor:
        return norm(self) * (float("nan") if next(calls) == 20 else 1)

    GradientNorm.__call__ = once  # type: ignore[method-assign]


def test_replicas_that_exchange_no_gradients_are_not_blamed(tmp_path: Path) -> None:
    run = planted_run(tmp_path, {}, steps=40, communication="local_sgd")
    run.spy = f"{__name__}:err_once"
    incarnation = run.start(2)
    assert incarnation.wait() == [1, 1], incarnation.output()
    (event,) = run.events("guard.corruption")
    assert (event["step"], event["check"], event["ranks"]) == (20, "redo", [])
    assert event["what"].endswith("gradient norm nan")


def test_the_replica_with_the_bad_loss_is_named(tmp_path: Path) -> None:
    """A norm is that of all replicas together, so that they skip alike; each replica has a loss of its own."""
    run = planted_run(tmp_path, {"passing": 31, "passing_rank": 1}, steps=60, communication="local_sgd")
    incarnation = run.start(2)
    assert incarnation.wait() == [1, 1], incarnation.output()
    (event,) = run.events("guard.corruption")
    assert (event["step"], event["check"], event["ranks"]) == (30, "redo", [1])


def test_a_step_is_done_again_with_the_weights_that_a_replica_had(tmp_path: Path) -> None:
    """Though all became one model after it, at the end of that very step."""
    run = planted_run(
        tmp_path, {"spot": 31}, steps=60, communication="diloco", diloco={"every": 3}
    )  # one pass is thrown away
    incarnation = run.start(2)
    assert incarnation.wait() == [1, 1], incarnation.output()
    (event,) = run.events("guard.nonfinite")
    assert (event["step"], event["rank"], event["where"]) == (30, 1, "the gradient of 2's output")


def test_a_nan_stops_all_ranks_and_its_origin_is_reported(tmp_path: Path) -> None:
    nan = sample_at(30, 11)  # the second of two ranks has it
    run = planted_run(tmp_path, {"nan": nan}, steps=200, checkpoint_every=5)
    incarnation = run.start(2)
    assert incarnation.wait() == [1, 1], incarnation.output()
    (event,) = run.events("guard.nonfinite")
    assert (event["step"], event["rank"], event["where"]) == (30, 1, "the output of 0")
    assert event["samples"]["ids"][11] == nan
    assert "numerics.nonfinite: step 30" in incarnation.output()
    assert run.checkpoints[-1].step == 25
    assert list(run.series(rank=0)) == list(run.series(rank=1))
    assert max(run.series()) <= 30

    payload = json.loads((incarnation.attempt_dir / "numerics" / "step-30.json").read_text())
    (report,) = payload["ranks"]
    assert (report["rank"], report["output"], report["loss"]) == (1, "0", "nan")
    assert payload["losses"]["0"] == pytest.approx(run.series(rank=0)[30])
    assert len(report["samples"]) == BATCH // 2
    assert nan in report["samples"]
    assert len(report["texts"]) == 4
    assert report["parameters"][0] == {"name": "0.weight", "gradient_norm": "nan"}


@pytest.mark.parametrize(("rank", "named", "who"), [(1, [1], "on rank 1"), (-1, [], "on one of ranks 0, 1")])
def test_a_nan_that_does_not_come_again_is_hardwares(rank: int, named: list[int], who: str, tmp_path: Path) -> None:
    """A bad loss names its rank; a bad gradient does not, as all ranks have exchanged it."""
    run = planted_run(tmp_path, {"passing": 31, "passing_rank": rank}, steps=60, checkpoint_every=5)
    incarnation = run.start(2)
    assert incarnation.wait() == [1, 1], incarnation.output()
    (event,) = run.events("guard.corruption")
    assert (event["check"], event["step"], event["ranks"], event["intact"]) == ("redo", 30, named, True)
    assert event["node"] == node_name(), "both are on it"
    assert not run.events("guard.nonfinite")
    text = incarnation.output()
    assert "NumericsError: numerics.corruption: at step 30 loss " in text
    assert f"but finite when the step was repeated: hardware fault {who}" in text
    assert json.loads((incarnation.attempt_dir / "numerics" / "step-30.json").read_text())["what"].startswith("loss ")


def spoil_a_weight() -> None:
    """Damage a weight of the second rank alone: the first receives what it sends, too."""

    def spoil(modules: dict[str, nn.Module]) -> None:
        part: Any = modules["blocks.1.mlp.up"].weight
        with torch.no_grad():
            local(part).view(-1)[0] = float("nan")

    _before_the_third_step(spoil)


def spoil_a_gradient() -> None:
    """Damage the gradient of a block that the second rank has."""

    def spoil(modules: dict[str, nn.Module]) -> None:
        modules["blocks.3.mlp.up"].register_full_backward_pre_hook(lambda _, gradients: (gradients[0] * math.nan,))

    _before_the_third_step(spoil)


def _before_the_third_step(spoil: Callable[[dict[str, nn.Module]], None]) -> None:
    run_step = Trainer._run_step

    def spoilt(trainer: Trainer) -> StepFlags:
        if trainer.step == 2 and os.environ["RANK"] == "1":
            spoil({name: module for part in trainer.assembly.model.parts for name, module in part.named_modules()})
        return run_step(trainer)

    Trainer._run_step = spoilt  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("spy", "settings", "where"),
    [
        ("spoil_a_weight", {"mesh": {"tp": 2}}, "the output of blocks.1.mlp.up"),
        ("spoil_a_weight", {"mesh": {"cp": 2}}, "the output of blocks.1.mlp.up"),
        ("spoil_a_weight", {"mesh": {"pp": 2}, "pipeline": {"schedule": "DualPipeV"}}, "the output of blocks.1.mlp.up"),
        ("spoil_a_gradient", {"mesh": {"pp": 2}}, "the gradient of blocks.3.mlp.up's output"),
    ],
    ids=["tp", "cp", "pp, there and back", "pp, backward"],
)
@pytest.mark.sampled(2)
def test_a_rank_that_received_a_nan_is_not_its_origin(
    spy: str, settings: dict[str, Any], where: str, tmp_path: Path
) -> None:
    language = {**TINY["language"], "layers": 4}
    run = Run(tmp_path / "run", {**TINY, "checkpoint_every": 0, "language": language, **settings})
    run.spy = f"{__name__}:{spy}"
    incarnation = run.start(2)
    assert incarnation.wait() == [1, 1], incarnation.output()
    (event,) = run.events("guard.nonfinite")
    assert (event["step"], event["rank"], event["where"], event["ranks"]) == (3, 1, where, [0, 1])


def test_a_worker_of_a_parameter_server_names_what_is_not_finite(tmp_path: Path) -> None:
    run = planted_run(tmp_path, {"nan": sample_at(30, 11)}, steps=40, communication="parameter_server")
    incarnation = run.start(2)
    incarnation.processes[1].join(60)
    incarnation.kill()  # the launcher's part: the server waits for a worker that is gone
    assert incarnation.processes[1].exitcode == 1
    (failed,) = run.events("run.failed", rank=1)
    assert failed["exception"] == "NumericsError"
    assert failed["error"] == "numerics.nonfinite: step 30: loss nan, gradient norm nan on rank 1"
