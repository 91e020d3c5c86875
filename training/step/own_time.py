"""Measure a rank's own time per step, without the time it waits for others. It has three parts:

data      waiting for its batch
compute   forward and backward up to its last gradient, measured where no pass exchanges anything before that (ddp,
          zero1): by the clock, on a GPU by events that are read later. In other layouts a slow rank slows every
          exchange, so no clock can tell ranks apart: there it is CPU time, and nothing on a GPU
host      everything else from the end of the last exchange to the next forward pass: optimizer, reports, checkpoints

Waiting for others meanwhile, for the flags that all exchange or for a GPU that is behind, is in none of them: a rank
must not look slow because it waits for a slow one.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from training.runtime.distributed import World

PARTS = ("data", "compute", "host")


@dataclass(frozen=True)
class StepMeans:
    """Seconds per step of one rank, averaged over a window."""

    data: float
    compute: float
    host: float
    step: float
    """The whole step, including waiting for others."""

    @property
    def own(self) -> float:
        return self.data + self.compute + self.host


class OwnTime:
    """Measures one rank's own time, step after step."""

    def __init__(
        self,
        world: World,
        parameters: list[nn.Parameter],
        *,
        exchanges_late: bool,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`exchanges_late`: the first exchange of a step is that of the gradients."""
        self._is_cuda, self._exchanges_late, self._clock = world.device.type == "cuda", exchanges_late, clock
        self._entered_at = self._left_at = self._waited = self._last_gradient_at = self._cpu_began = 0.0
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._data = self._compute = self._host = 0.0
        self._steps = 0
        self._step_times: list[float] = []
        self._step_seconds = 0.0
        self._follows_step = self._is_inside = False
        if exchanges_late:
            # The gradient of the first parameter is computed last.
            parameters[0].register_post_accumulate_grad_hook(self._note_gradient)  # type: ignore[no-untyped-call]

    def enter(self) -> None:
        """Record the time just before the forward pass."""
        self._is_inside = True
        self._entered_at = self._clock()
        self._follows_step = bool(self._left_at)
        if self._follows_step:
            self._host += self._entered_at - self._left_at - self._waited
        if self._is_cuda and self._exchanges_late:
            self._events.append((_event(), _event()))
            self._events[-1][0].record()
        elif not self._exchanges_late:
            self._cpu_began = time.thread_time()

    def leave(self) -> None:
        """Record that the gradients have been exchanged."""
        self._is_inside = False
        self._left_at, self._waited = self._clock(), 0.0
        if not self._exchanges_late:
            self._compute += 0.0 if self._is_cuda else time.thread_time() - self._cpu_began
        elif not self._is_cuda:
            self._compute += self._last_gradient_at - self._entered_at
        self._steps += 1

    def wait(self, seconds: float) -> None:
        """Record seconds of waiting since `leave`.

        For other ranks, or for this rank's GPU, which may wait for theirs.
        """
        self._waited += seconds

    def note_data(self, data_seconds: float) -> None:
        """Record how long the step waited for its data."""
        self._data += data_seconds
        self._host -= data_seconds if self._follows_step else 0.0

    def note_step(self, step_seconds: float) -> None:
        """Record how long a step took in total; on a GPU this is known some steps later."""
        self._step_times.append(step_seconds)

    def means(self) -> StepMeans:
        """Return the means since the last call."""
        data, compute, host = (part / max(1, self._steps) for part in (self._data, self._compute, self._host))
        if self._is_cuda and self._exchanges_late:
            compute = self._compute_on_gpu()
        if self._step_times:
            self._step_seconds = sum(self._step_times) / len(self._step_times)
        self._data = self._compute = self._host = 0.0
        self._steps, self._step_times = 0, []
        return StepMeans(max(0.0, data), max(0.0, compute), max(0.0, host), self._step_seconds)

    def forget(self) -> None:
        """Exclude the time until the next step, such as a validation or a save."""
        self._left_at = 0.0

    def _note_gradient(self, parameter: Tensor) -> None:
        if not self._is_inside:  # a pass outside of a step: discarded, or repeated for a comparison
            return
        if self._is_cuda:
            self._events[-1][1].record()
        else:
            self._last_gradient_at = self._clock()

    def _compute_on_gpu(self) -> float:
        """Return the mean compute seconds of the steps that the GPU has finished, without waiting for it."""
        done = [pair for pair in self._events[:-1] if pair[1].query()]  # type: ignore[no-untyped-call]
        self._events = self._events[-1:]
        milliseconds = sum(float(start.elapsed_time(end)) for start, end in done)
        return milliseconds / 1000 / max(1, len(done))


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
