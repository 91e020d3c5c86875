"""Measure the parts of a step: forward, backward, optimizer. Nothing is waited for.

On a GPU the marks are events in its own stream, read when the metrics are fetched; on a CPU they are clock readings. A
part lasts from the previous mark, so parts never overlap; communication that is waited for counts towards the part that
waits (training.metrics.step_trace determines how much).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from training.data import Batch, Task

FORWARD, BACKWARD, BOTH, OPTIMIZER, EXCHANGE = "forward", "backward", "forward_backward", "optimizer", "exchange"
"""Parts of a step. `forward_backward`: in a pipeline, where the two are interleaved. `exchange`: of infrequently
synchronised replicas, after the step."""

Marks = list[tuple[str, Any]]
"""(part that ends here, moment): moments are seconds, or CUDA events. The first mark begins the step."""


class StepTimer:
    """Times one rank's steps: `begin`, then `mark` at the end of each part, then `end`."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._marks: Marks = []
        self._spare: list[Any] = []

    def begin(self) -> None:
        self._marks = []
        self.mark("")

    def mark(self, part: str) -> None:
        """End a part: the time since the previous mark belongs to it."""
        self._marks.append((part, self._event() if self._on_gpu else time.perf_counter()))

    def end(self) -> Marks:
        """Return the marks since `begin`; on a GPU, `read` them once the device has finished the step."""
        marks, self._marks = self._marks, []
        return marks

    def read(self, marks: Marks) -> dict[str, float]:
        """Return the seconds of each part."""
        seconds_by_part: dict[str, float] = {}
        for (_, before), (part, after) in zip(marks, marks[1:], strict=False):
            seconds = before.elapsed_time(after) / 1000 if self._on_gpu else after - before
            seconds_by_part[part] = seconds_by_part.get(part, 0.0) + seconds
        if self._on_gpu:
            self._spare += (event for _, event in marks)
        seconds_by_part.pop("", None)
        return seconds_by_part

    def timed(self, task: Task) -> Task:
        """Return the task with its loss timed, which is the forward pass.

        The time before it belongs to the backward pass of the previous micro-batch, if there was one.
        """
        loss = task.loss

        def timed(model: Callable[..., Tensor], batch: Batch) -> Tensor:
            self.mark(BACKWARD if len(self._marks) > 1 else "")
            result = loss(model, batch)
            self.mark(FORWARD)
            return result

        return replace(task, loss=timed)

    def _event(self) -> Any:
        event = self._spare.pop() if self._spare else torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event
