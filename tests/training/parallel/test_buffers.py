"""What a model keeps beside its parameters, such as running means, is the same on all ranks between two steps."""

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


@pytest.mark.slow
@pytest.mark.parametrize("parallelism", ["ddp", "fsdp"])
def test_running_means_resume_and_are_no_corruption(parallelism: str, tmp_path: Path) -> None:
    for kind in ("recipes", "parallel"):
        (tmp_path / "added" / kind).mkdir(parents=True)
    (tmp_path / "added" / "recipes" / "normed.py").write_text(NORMED)
    table: dict[str, Any] = {key: value for key, value in TINY.items() if key != "language"}
    table |= {"recipe": "normed", "parallelism": parallelism, "global_batch": 16, "steps": 8}
    table |= {"validate_every": 8, "check_weights_every": 2}
    run = Run(tmp_path / "run", table, added=tmp_path / "added")
    run.finish(2)
    expected = run.series("validation_loss")
    shutil.rmtree(run.job_dir / "checkpoints" / "step-8")
    run.finish(2, resume="step-4")
    assert run.events("run.started")[0]["resumed_from"] == "step-4"
    assert run.series("validation_loss") == expected
    assert len(expected) == 1
