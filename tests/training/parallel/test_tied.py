"""Test that a tied head is one parameter with the embedding on every layout, from the first step to the checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.training.ranks import TINY, Run
from training.__main__ import main
from training.weights.weight_files import open_weights

pytestmark = pytest.mark.slow
MODEL = {"layers": 2, "heads": 2, "head_width": 8, "context": 16, "tied": True}
CONFIG: dict[str, Any] = {**TINY, "steps": 5, "checkpoint_every": 0, "language": MODEL}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Run:
    run = Run(tmp_path_factory.mktemp("tied") / "run", CONFIG)
    run.finish(1)
    return run


def test_head_and_embedding_stay_tied(alone: Run, tmp_path: Path) -> None:
    target = tmp_path / "model.safetensors"
    assert main(["export", str(alone.job_dir / "checkpoints" / "step-5"), str(target)]) == 0
    weights = open_weights(target)
    assert torch.equal(weights.read("head.weight"), weights.read("tokens.weight"))


@pytest.mark.parametrize(
    "layout",
    [{"parallelism": "ddp"}, {"parallelism": "fsdp"}, {"mesh": {"tp": 2}}],
    ids=["ddp", "fsdp", "tp"],
)
@pytest.mark.sampled(3)
def test_on_two_ranks_it_is_the_same_run(layout: dict[str, Any], alone: Run, tmp_path: Path) -> None:
    run = Run(tmp_path / "run", {**CONFIG, **layout})
    run.finish(2)
    losses = [run.series(rank=rank) for rank in range(2)]
    assert {step: (losses[0][step] + losses[1][step]) / 2 for step in losses[0]} == pytest.approx(
        alone.series(), abs=1e-5
    )
    assert run.series("gradient_norm") == pytest.approx(alone.series("gradient_norm"), rel=1e-4)
