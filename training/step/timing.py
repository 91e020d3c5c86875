"""Where a step's time goes: forward, backward, optimizer. Nothing is waited for.

On a GPU the marks are events in its own stream, read when the metrics are fetched; on a CPU they are the clock. A part
lasts from the mark before it, so parts never overlap; communication that is waited for is inside the part that waits
(training.metrics.step_trace says how much of it).
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
"""Parts of a step. `forward_backward`: of a pipeline, where the two are interleaved. `exchange`: of replicas that stay
apart, after their own step."""

Marks = list[tuple[str, Any]]
"""(part that ends here, moment): moments are seconds, or CUDA events. The first one begins the step's own work."""


class Watch:
    """One rank's watch: `begin`, then `mark` at the end of each part, then `end`."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._marks: Marks = []
        self._spare: list[Any] = []

    def begin(self) -> None:
        self._marks = []
        self.mark("")

    def mark(self, part: str) -> None:
        """What has passed since the mark before belongs to this part."""
        self._marks.append((part, self._event() if self._on_gpu else time.perf_counter()))

    def end(self) -> Marks:
        """The marks since `begin`; on a GPU to be read by `read` once the device has come this far."""
        marks, self._marks = self._marks, []
        return marks

    def read(self, marks: Marks) -> dict[str, float]:
        """Seconds by part."""
        found: dict[str, float] = {}
        for (_, before), (part, after) in zip(marks, marks[1:], strict=False):
            seconds = before.elapsed_time(after) / 1000 if self._on_gpu else after - before
            found[part] = found.get(part, 0.0) + seconds
        if self._on_gpu:
            self._spare += (event for _, event in marks)
        found.pop("", None)
        return found

    def timed(self, task: Task) -> Task:
        """The task with its loss timed, which is the forward pass: what comes before it belongs to the backward pass of
        the micro-batch before, if there was one."""
        loss = task.loss

        def timed(model: Callable[..., Tensor], batch: Batch) -> Tensor:
            self.mark(BACKWARD if len(self._marks) > 1 else "")
            found = loss(model, batch)
            self.mark(FORWARD)
            return found

        return replace(task, loss=timed)

    def _event(self) -> Any:
        event = self._spare.pop() if self._spare else torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event
