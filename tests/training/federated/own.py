"""Files of somebody's own, and runs of them in this process."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from tests.training.federated.in_process import Telling, start
from training.federated.rounds import Rounds
from training.federation.config import beside_code

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
    folder: Path, client: str = LINEAR, algorithm: str = "", /, *, telling: Telling | None = None, **run: Any
) -> Rounds:
    """The next attempt of a run in this folder, with these files."""
    code = folder / "code"
    code.mkdir(parents=True, exist_ok=True)
    for name, text in {"client.py": client, "algorithm.py": algorithm}.items():
        (code / name).write_text(text)
        sys.modules.pop(Path(name).stem, None)  # a process has one run, but this one has many
    return start(folder / "run", beside_code({**RUN, **run}), reporter=telling, code=code)


def ready(folder: Path, *files: str, **run: Any) -> Rounds:
    loop = started(folder, *files, **run)
    loop._prepare(None)
    return loop
