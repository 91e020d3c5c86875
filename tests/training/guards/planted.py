"""A run of a recipe with faults injected into its samples, ranks and weights."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

import numpy as np

from tests.training.ranks import Run
from training.loader.order import Order
from training.runtime.seeds import derive_seed

SAMPLES, BATCH = 4000, 16

PLANTED = '''
"""A small network on made-up numbers; samples, ranks and weights go wrong as told."""

import os
import time
from typing import Annotated

from training.data import Prepared, Task

RANK = int(os.environ.get("RANK", "0"))  # a portal reads the options of build, without torch


def prepare(cache, identity=None):
    return Prepared(cache, "planted")


def build(
    data,
    *,
    huge: Annotated[int, "Sample with numbers far too large."] = -1,
    nan: Annotated[int, "Sample that holds a NaN."] = -1,
    passing: Annotated[int, "At which of its losses one rank alone computes no number, that once."] = 0,
    passing_rank: Annotated[int, "Which rank: -1: in the gradient of the last one alone, once."] = 0,
    burst: Annotated[int, "From this step on every third one's loss is far too large."] = 0,
    level: Annotated[int, "From this loss on every one is far larger."] = 0,
    worse: Annotated[int, "From this loss on it is larger for good."] = 0,
    sleeper: Annotated[int, "Rank that takes longer than the others."] = -1,
    flaky: Annotated[int, "Rank that computes something else each time, from its twentieth loss on."] = -1,
    spot: Annotated[int, "At which of its losses the second rank comes to weights that give no number."] = 0,
    flip_rank: Annotated[int, "Rank in whose weights a bit is flipped."] = -1,
    flip_call: Annotated[int, "At which of its losses, those of checks included."] = 0,
):
    import torch

    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 1))
    calls = 0
    bad = None

    def batch(split, ids):
        numbers = torch.from_numpy(ids).float()
        inputs = torch.sin(numbers[:, None] * torch.arange(1, 9))
        inputs[torch.from_numpy(ids == huge)] *= 1e4
        inputs[torch.from_numpy(ids == nan), 3] = float("nan")
        return inputs, torch.cos(7 * numbers)

    def loss(model_, batch):
        nonlocal calls, bad
        calls += 1
        if calls == flip_call and flip_rank == RANK:
            model[0].weight.data.view(torch.int32)[3, 3] ^= 1 << 5
        if sleeper == RANK:
            time.sleep(0.03)
        found = (model_(batch[0])[:, 0] - batch[1]).square().mean()
        if calls == spot and RANK == 1:
            bad = model[2].weight.detach().clone()
        if bad is not None and torch.equal(model[2].weight, bad):
            found = found * float("nan")
        if level and calls > level:
            found = found * 100
        if worse and calls > worse:
            found = found + 10
        if calls == passing and passing_rank == RANK:
            found = found * float("nan")
        if calls == passing and passing_rank < 0 and RANK == 1:
            found.register_hook(lambda gradient: gradient * float("nan"))
        if flaky == RANK and calls > 20:
            found = found * (1 + calls * 1e-6)
        return found * 1e6 if burst and calls > burst and calls % 3 == 0 else found

    return Task(
        model=model,
        samples={"train": 4000, "validation": 64},
        batch=batch,
        loss=loss,
        score=lambda model, batch: {"loss": loss(model, batch)},
        show=lambda batch: [f"begins with {float(first):.3f}" for first in batch[0][:, 0]],
    )
'''


def planted_run(folder: Path, planted: dict[str, Any], **settings: Any) -> Run:
    recipes = folder / "added" / "recipes"
    recipes.mkdir(parents=True)
    (folder / "added" / "parallel").mkdir()
    (recipes / "planted.py").write_text(textwrap.dedent(PLANTED))
    run = Run(folder / "run", added=folder / "added")
    run.config = {
        "recipe": "planted",
        "global_batch": BATCH,
        "learning_rate": 3e-3,
        "warmup_steps": 5,
        "validate_every": 0,
        "checkpoint_every": 0,
        "flush_steps": 7,
        **settings,
        "planted": planted,
    }
    run.write()
    return run


def sample_at(step: int, place: int) -> int:
    """Return the sample at this position of this step's batch."""
    order = Order(SAMPLES, derive_seed(0, 1))
    return int(order.ids(np.array([(step - 1) * BATCH + place]))[0])
