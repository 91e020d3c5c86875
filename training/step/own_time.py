"""A rank's own time of a step, without what it spends waiting for others. It has three parts:

data      waiting for its batch
compute   forward and backward up to its last gradient, which is measured where no pass exchanges anything before that
          (ddp, zero1): by the clock, on a GPU by events that are read later. In other layouts a slow rank slows every
          exchange, so no clock can tell them apart: there it is processor time, and nothing on a GPU
host      everything else from the end of the last exchange to the next forward pass: optimizer, reports, checkpoints

What is waited for others meanwhile, at the flags that all exchange or for a GPU that is behind, is in none of them: a
rank must not look slow because it waits for a slow one.
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
class Spent:
    """Seconds a step of one rank, in the mean over a window."""

    data: float
    compute: float
    host: float
    step: float
    """The whole of it, with what was waited for others."""

    @property
    def own(self) -> float:
        return self.data + self.compute + self.host


class OwnTime:
    """One rank's own time, step after step."""

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
        self._entered = self._left = self._waited = self._last_gradient = self._processor = 0.0
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._data = self._compute = self._host = 0.0
        self._steps = 0
        self._taken: list[float] = []
        self._step_seconds = 0.0
        self._goes_on = self._is_inside = False
        if exchanges_late:
            # Nothing before it has a gradient, so of all parameters its own comes last.
            parameters[0].register_post_accumulate_grad_hook(self._note_gradient)  # type: ignore[no-untyped-call]

    def enter(self) -> None:
        """Notes the time just before the forward pass."""
        self._is_inside = True
        self._entered = self._clock()
        self._goes_on = bool(self._left)
        if self._goes_on:
            self._host += self._entered - self._left - self._waited
        if self._is_cuda and self._exchanges_late:
            self._events.append((_event(), _event()))
            self._events[-1][0].record()
        elif not self._exchanges_late:
            self._processor = time.thread_time()

    def leave(self) -> None:
        """Gradients are exchanged."""
        self._is_inside = False
        self._left, self._waited = self._clock(), 0.0
        if not self._exchanges_late:
            self._compute += 0.0 if self._is_cuda else time.thread_time() - self._processor
        elif not self._is_cuda:
            self._compute += self._last_gradient - self._entered
        self._steps += 1

    def wait(self, seconds: float) -> None:
        """Notes a wait since it left, in seconds: for other ranks, or for its own GPU, which may wait for theirs."""
        self._waited += seconds

    def note(self, data_seconds: float) -> None:
        """How long the step waited for its data."""
        self._data += data_seconds
        self._host -= data_seconds if self._goes_on else 0.0

    def took(self, step_seconds: float) -> None:
        """How long a step took from its beginning to its end: on a GPU it is known some steps later."""
        self._taken.append(step_seconds)

    def means(self) -> Spent:
        """The means since the last call."""
        data, compute, host = (part / max(1, self._steps) for part in (self._data, self._compute, self._host))
        if self._is_cuda and self._exchanges_late:
            compute = self._measured()
        if self._taken:
            self._step_seconds = sum(self._taken) / len(self._taken)
        self._data = self._compute = self._host = 0.0
        self._steps, self._taken = 0, []
        return Spent(max(0.0, data), max(0.0, compute), max(0.0, host), self._step_seconds)

    def forget(self) -> None:
        """What lies between now and the next step is no step's: a validation, a save."""
        self._left = 0.0

    def _note_gradient(self, parameter: Tensor) -> None:
        if not self._is_inside:  # a pass that is no step's: one thrown away, or repeated to compare
            return
        if self._is_cuda:
            self._events[-1][1].record()
        else:
            self._last_gradient = self._clock()

    def _measured(self) -> float:
        """Seconds of compute in a mean step, of those that the GPU has done; it is not waited for."""
        done = [pair for pair in self._events[:-1] if pair[1].query()]  # type: ignore[no-untyped-call]
        self._events = self._events[-1:]
        milliseconds = sum(float(start.elapsed_time(end)) for start, end in done)
        return milliseconds / 1000 / max(1, len(done))


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
