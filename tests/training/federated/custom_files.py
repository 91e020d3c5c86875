"""Custom files of users, and runs of them in this process."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.training.federated.in_process import RecordingReporter, start
from training.federated.rounds import Rounds
from training.federation.config import with_custom_recipe
from training.runtime.distributed import World

NOTHING: Mapping[str, str] = {}

LINEAR = """
import torch
from torch import nn


def model():
    return nn.Linear(4, 3)


def data(client):
    draw = torch.Generator().manual_seed(client)
    x = torch.randn(6 + 6 * client, 4, generator=draw)
    return x, (x[:, 0] > 0).long() + (x[:, 1] > 0).long()
"""
"""Three classes, and six samples more for each client; every sixth is kept for validation."""
MOMENTUM = """

def train(model, batches, learning_rate, *, momentum=0.9):
    optimizer = torch.optim.SGD(model.parameters(), lr=learning_rate, momentum=momentum)
    for x, y in batches:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
"""
ALGORITHM = "def aggregate(server):\n    return server.model + server.mean['delta']\n"
RUN: dict[str, Any] = {"clients": 3, "rounds": 4, "learning_rate": 0.3, "checkpoint_every": 2}


def started(
    folder: Path,
    client: str = LINEAR,
    algorithm: str = "",
    /,
    *,
    reporter: RecordingReporter | None = None,
    files: Mapping[str, str] = NOTHING,
    world: World | None = None,
    **run: Any,
) -> Rounds:
    """Start the next attempt of a run in this folder, with these files and `files` by name."""
    code = folder / "code"
    code.mkdir(parents=True, exist_ok=True)
    for name, text in {"client.py": client, "algorithm.py": algorithm, **files}.items():
        (code / name).write_text(text)
        sys.modules.pop(Path(name).stem, None)  # a process has one run, but this one has many
    return start(folder / "run", with_custom_recipe({**RUN, **run}), reporter=reporter, code=code, world=world)


def ready(folder: Path, *files: str, **run: Any) -> Rounds:
    loop = started(folder, *files, **run)
    loop._prepare(None)
    return loop
