"""Test that a model's buffers, such as running means, are the same on all ranks between two steps."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.training.ranks import TINY, Run

NORMED = '''
"""Numbers, and a model that keeps their running means."""
import torch
from training.data import Prepared, Task

def prepare(cache, identity=None):
    return Prepared(cache, "numbers")

def build(data, *, samples: int = 64):
    torch.manual_seed(0)
    table = torch.randn(samples, 3)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1))
    loss = lambda model, batch: (model(batch[0]) - batch[0][:, :1] ** 2).square().mean()
    return Task(model=model, samples={"train": samples, "validation": 16}, loss=loss,
                batch=lambda split, ids: (table[torch.as_tensor(ids)],),
                score=lambda model, batch: {"loss": loss(model, batch)})
'''


@pytest.fixture
def table(tmp_path: Path) -> dict[str, Any]:
    """Return the table of a run with the recipe in the folder `added`."""
    for kind in ("recipes", "parallel"):
        (tmp_path / "added" / kind).mkdir(parents=True)
    (tmp_path / "added" / "recipes" / "normed.py").write_text(NORMED)
    common = {key: value for key, value in TINY.items() if key != "language"}
    return {**common, "recipe": "normed", "global_batch": 16, "steps": 8, "validate_every": 8}


@pytest.mark.slow
@pytest.mark.parametrize("parallelism", ["ddp", "fsdp"])
def test_running_means_resume_and_are_no_corruption(parallelism: str, table: dict[str, Any], tmp_path: Path) -> None:
    settings = {**table, "parallelism": parallelism, "check_weights_every": 2}
    run = Run(tmp_path / "run", settings, added=tmp_path / "added")
    run.finish(2)
    expected = run.series("validation_loss")
    shutil.rmtree(run.job_dir / "checkpoints" / "step-8")
    run.finish(2, resume="step-4")
    assert run.events("run.started")[0]["resumed_from"] == "step-4"
    assert run.series("validation_loss") == expected
    assert len(expected) == 1


@pytest.mark.slow
def test_a_server_has_the_running_means_of_its_workers(table: dict[str, Any], tmp_path: Path) -> None:
    losses = []
    for ranks, communication in ((1, "plain"), (2, "parameter_server")):  # one worker's steps are those of one process
        settings = {**table, "communication": communication, "micro_batch": 8}
        run = Run(tmp_path / communication, settings, added=tmp_path / "added")
        run.finish(ranks)
        losses.append(run.series("validation_loss")[8])
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


@pytest.mark.slow
def test_recomputing_takes_no_batch_into_running_means_twice(table: dict[str, Any], tmp_path: Path) -> None:
    found = []
    for how in ("none", "selective", "full"):
        run = Run(tmp_path / how, {**table, "checkpoint_every": 0, "recompute": how}, added=tmp_path / "added")
        run.finish(1)
        found.append(run.series("validation_loss"))
    assert found == [found[0]] * 3
    assert len(found[0]) == 1
