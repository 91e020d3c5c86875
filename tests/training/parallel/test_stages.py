"""Test a rank's pipeline stages, without the other ranks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from training.data import Task
from training.parallel import _stages
from training.step.arithmetic import MicroBatch

THERE = torch.device("meta")
"""Stands for a GPU: not where the parameters are."""
SENT = torch.tensor([2, 3, 4, 0, 0, 0, 0, 0])
"""Of a stream: two dims, 3 × 4, float32."""


class Offloaded(nn.Module):
    """A module with parameters in main memory until they are gathered."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.seen: list[torch.device] = []

    def forward(self, stream: Tensor) -> Tensor:
        self.seen.append(stream.device)
        return stream


def _receive(tensor: Tensor, **options: object) -> None:
    if tensor.device != THERE:
        tensor.copy_(SENT)


def test_with_offload_a_stage_receives_where_the_batches_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Main memory and a GPU have separate backends: one would wait for what the other sent."""
    stages: list[torch.device] = []

    def stage(part: nn.Module, number: int, count: int, device: torch.device, *, group: object) -> None:
        stages.append(device)

    class Schedule:
        def __init__(self, *arguments: object, **options: object) -> None: ...

        def step(self, *arguments: object, **options: object) -> None: ...

    def nothing(*arguments: object, **options: object) -> None: ...

    others = {"broadcast": nothing, "broadcast_object_list": nothing, "recv": _receive}
    monkeypatch.setattr(_stages, "dist", SimpleNamespace(get_rank=lambda group: 1, **others))
    monkeypatch.setattr(_stages, "PipelineStage", stage)
    monkeypatch.setattr(_stages, "get_schedule_class", lambda name: Schedule)

    part = Offloaded()
    nobody: Any = None
    pipeline = _stages.Pipeline([part], [1], [0, 1], group=nobody, schedule="GPipe")
    tokens = torch.zeros(3, 4, device=THERE)
    task = Task(
        model=part,
        samples={},
        batch=lambda split, ids: (tokens,),
        loss=lambda model, batch: model(batch[0]).sum(),
        score=lambda model, batch: {"loss": torch.zeros(())},
        inputs=lambda batch: batch[0],
    )
    pipeline.forward_backward(task, [MicroBatch((tokens,), 1.0, 1.0, seed=1)])
    pipeline.score(task, (tokens,))
    assert stages == [THERE]
    assert part.seen == [THERE]
