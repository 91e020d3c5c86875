"""What is measured each step: kept on the device, fetched with one copy every so many steps or seconds.

Fetching a value makes the host wait for the device, so it is never done step by step.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from training.engine.optimizer_step import Known, StepResult
from training.reporting.reporter import AnyReporter
from training.step.timing import Marks
from training.units import GIB, MIB

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True)
class StepTimes:
    """Wall-clock seconds of one step, the data's part included; and what was sent in it."""

    step: float
    data: float
    marks: Marks = field(default_factory=list)
    """When its parts ended: to be read once the device has come this far."""
    sent: float | None = None
    """Bytes that this rank sent to the others, where that is known."""
    saving: bool = False
    """Some rank was writing a checkpoint meanwhile."""


class Read(Protocol):
    """What knows more of a step than its loss (training.metrics.measuring)."""

    def read(self, step: int, times: StepTimes) -> dict[str, float]:
        """Series of a step that is over: `step_seconds`, on every rank, and more for rank 0."""

    def flushed(self) -> None:
        """All steps so far have been read."""


class Meter:
    """Collects, and reports every `flush_steps` steps or `flush_seconds`, whichever is first; the first at once."""

    def __init__(
        self,
        reporter: AnyReporter,
        *,
        leads: bool,
        unit: str,
        units_per_step: int,
        flush_steps: int,
        flush_seconds: float,
        say: Callable[[str], None],
        know: Callable[[Sequence[Known], float], None],
        device: torch.device,
        measuring: Read,
    ) -> None:
        """`know`: is given steps that the device has finished, and how long it was waited for, seconds."""
        self._measuring = measuring
        self._reporter, self._leads, self._say, self._device = reporter, leads, say, device
        self._know = know
        self._unit, self._units = unit, units_per_step
        self._flush_steps, self._flush_seconds = flush_steps, flush_seconds
        self._steps: list[tuple[int, float, StepTimes]] = []
        self._values: list[Tensor] = []
        self._due = 0.0

    def record(self, step: int, done: StepResult, times: StepTimes) -> None:
        """One step's values, which stay on the device."""
        self._steps.append((step, done.learning_rate, times))
        self._values += (done.loss, done.norm)
        if len(self._steps) >= self._flush_steps or time.monotonic() >= self._due:
            self.flush()

    def flush(self) -> None:
        """Hands everything over to the reporter, whose thread writes it."""
        if not self._steps:
            return
        began = time.perf_counter()
        values = torch.stack(self._values).tolist()
        waited = time.perf_counter() - began
        known: list[Known] = []
        for (step, learning_rate, times), loss, norm in zip(self._steps, values[::2], values[1::2], strict=True):
            log = {"loss": loss, "gradient_norm": norm, **self._measuring.read(step, times)}
            exchange = log.get("exchange_seconds", 0.0)
            known.append(Known(step, loss, norm, log["step_seconds"], times.saving, exchange))
            if self._leads:
                log["learning_rate"] = learning_rate
                log["data_seconds"] = times.data
                if times.sent is not None:
                    log["communicated_mib"] = times.sent / MIB
                log[f"{self._unit}_per_second"] = self._units / max(log["step_seconds"], 1e-9)
            self._reporter.log(step, **log)
        self._know(known, waited)
        self._reporter.log(self._steps[-1][0], memory_gib=memory_gib(self._device))
        self._measuring.flushed()
        self._reporter.flush()
        if self._leads:
            self._tell(known)
        self._steps, self._values = [], []
        self._due = time.monotonic() + self._flush_seconds

    def _tell(self, known: Sequence[Known]) -> None:
        last, learning_rate = known[-1], self._steps[-1][1]
        rate = f"{self._units * len(known) / max(sum(one.seconds for one in known), 1e-9):,.0f} {self._unit}/s"
        self._say(f"step {last.step}  loss {last.loss:.4f}  norm {last.norm:.3f}  lr {learning_rate:.2e}  {rate}")


def memory_gib(device: torch.device) -> float:
    """What this rank holds: on its GPU at most so far, else in main memory now."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / GIB
    with open("/proc/self/statm", "rb") as file:
        return int(file.read().split()[1]) * PAGE_BYTES / GIB
