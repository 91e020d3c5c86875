"""Collect the measurements of each step on the device, and fetch them with one copy every few steps or seconds.

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

from training.engine.optimizer_step import StepRecord, StepResult
from training.reporting.reporter import AnyReporter
from training.step.timing import Marks
from training.units import GIB, MIB

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True)
class StepTimes:
    """Wall-clock seconds of one step including the wait for data, and the bytes sent in it."""

    step: float
    data: float
    marks: Marks = field(default_factory=list)
    """When its parts ended; to be read once the device has finished the step."""
    sent: float | None = None
    """Bytes that this rank sent to others, where that is known."""
    saving: bool = False
    """Whether some rank was writing a checkpoint meanwhile."""


class StepReader(Protocol):
    """Provides more about a finished step than its loss (training.metrics.measuring)."""

    def read(self, step: int, times: StepTimes) -> dict[str, float]:
        """Return series of a finished step: `step_seconds` on every rank, and more on rank 0."""

    def on_flush(self) -> None:
        """Called when all steps so far have been read."""


@dataclass(frozen=True, kw_only=True)
class MeterOptions:
    """What a step processes (`units_per_step` tokens or samples), and how often measurements are reported."""

    unit: str
    units_per_step: int
    flush_steps: int
    flush_seconds: float


class Meter:
    """Collects, and reports every `flush_steps` steps or `flush_seconds`, whichever comes first.

    The first step at once.
    """

    def __init__(
        self,
        reporter: AnyReporter,
        options: MeterOptions,
        *,
        leads: bool,
        log: Callable[[str], None],
        on_steps: Callable[[Sequence[StepRecord], float], None],
        device: torch.device,
        measuring: StepReader,
    ) -> None:
        """`on_steps` gets the steps that the device has finished, and the seconds spent waiting for it."""
        self._measuring = measuring
        self._reporter, self._leads, self._log, self._device = reporter, leads, log, device
        self._on_steps = on_steps
        self._options = options
        self._steps: list[tuple[int, float, StepTimes]] = []
        self._values: list[Tensor] = []
        self._due = 0.0

    def record(self, step: int, done: StepResult, times: StepTimes) -> None:
        """Add one step's values, which stay on the device."""
        self._steps.append((step, done.learning_rate, times))
        self._values += (done.loss, done.norm)
        if len(self._steps) >= self._options.flush_steps or time.monotonic() >= self._due:
            self.flush()

    def flush(self) -> None:
        """Fetch all values and pass them to the reporter, whose thread writes them."""
        if not self._steps:
            return
        began = time.perf_counter()
        values = torch.stack(self._values).tolist()
        waited = time.perf_counter() - began
        records: list[StepRecord] = []
        for (step, learning_rate, times), loss, norm in zip(self._steps, values[::2], values[1::2], strict=True):
            series = {"loss": loss, "gradient_norm": norm, **self._measuring.read(step, times)}
            exchange = series.get("exchange_seconds", 0.0)
            records.append(StepRecord(step, loss, norm, series["step_seconds"], times.saving, exchange))
            if self._leads:
                series["learning_rate"] = learning_rate
                series["data_seconds"] = times.data
                if times.sent is not None:
                    series["communicated_mib"] = times.sent / MIB
                per_second = self._options.units_per_step / max(series["step_seconds"], 1e-9)
                series[f"{self._options.unit}_per_second"] = per_second
            self._reporter.log(step, **series)
        self._on_steps(records, waited)
        self._reporter.log(self._steps[-1][0], memory_gib=memory_gib(self._device))
        self._measuring.on_flush()
        self._reporter.flush()
        if self._leads:
            self._log_progress(records)
        self._steps, self._values = [], []
        self._due = time.monotonic() + self._options.flush_seconds

    def _log_progress(self, records: Sequence[StepRecord]) -> None:
        last, learning_rate = records[-1], self._steps[-1][1]
        units, seconds = self._options.units_per_step * len(records), sum(record.seconds for record in records)
        rate = f"{units / max(seconds, 1e-9):,.0f} {self._options.unit}/s"
        self._log(f"step {last.step}  loss {last.loss:.4f}  norm {last.norm:.3f}  lr {learning_rate:.2e}  {rate}")


def memory_gib(device: torch.device) -> float:
    """Return this rank's memory: the peak on its GPU so far, else its resident main memory now."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / GIB
    with open("/proc/self/statm", "rb") as file:
        return int(file.read().split()[1]) * PAGE_BYTES / GIB
