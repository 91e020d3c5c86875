"""Fixtures with an NVML stand-in, and readers that are always stopped."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol, TypeVar

import pytest

from gpus.reader import GpuReader
from gpus.reports import GpuReport, GpuSamples
from tests.nvml import StandIn
from tests.waiting import until

EVERY = 0.1
T = TypeVar("T")


@pytest.fixture
def nvml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StandIn:
    """Let processes that this test starts find eight GPUs."""
    return stand_in(StandIn(tmp_path), monkeypatch)


def stand_in(library: StandIn, monkeypatch: pytest.MonkeyPatch) -> StandIn:
    for name, value in library.environment.items():
        monkeypatch.setenv(name, value)
    return library


class Watched:
    """A GPU reader, used like a client uses it, and the messages it has sent."""

    def __init__(self, names: list[str] | None = None, *, every: float = EVERY, **more: Any) -> None:
        options = {"detailed": True, "retry_seconds": (0.05, 0.1), **more}
        self.reader = GpuReader(names, every=every, **options)
        self.reports: list[GpuReport] = []

    def all(self, kind: type[T]) -> list[T]:
        self.reports += self.reader.poll()
        return [item for item in self.reports if isinstance(item, kind)]

    def first(self, kind: type[T]) -> T:
        return until(lambda: self.all(kind))[0]

    def next(self, kind: type[T]) -> T:
        """Return the next message sent from now on."""
        self.all(kind)
        self.reports.clear()
        return self.first(kind)

    def current(self) -> GpuSamples:
        """Return a sample of the current state: the one after the next, as a sample may be in progress."""
        self.next(GpuSamples)
        return self.next(GpuSamples)


# The stand-in's default values.
STEADY = {
    "gpu_percent": 90,
    "memory_mib": 30720,
    "temperature_c": 60,
    "watts": 350,
    "sm_mhz": 1980,
    "throttle": 0,
    "memory_temperature_c": 65,
    "sm_percent": 75,
    "pcie_tx_mib": 800,
    "pcie_rx_mib": 1200,
}


class Watch(Protocol):
    def __call__(self, names: list[str] | None = None, *, every: float = EVERY, **more: Any) -> Watched: ...


@pytest.fixture
def watch() -> Iterator[Watch]:
    watched: list[Watched] = []

    def start(names: list[str] | None = None, *, every: float = EVERY, **more: Any) -> Watched:
        watched.append(Watched(names, every=every, **more))
        return watched[-1]

    yield start
    for item in watched:
        pids = item.reader.pids
        item.reader.close()
        for pid in pids:
            with suppress(OSError):  # those that a test has made unkillable
                os.kill(pid, signal.SIGKILL)
    until(lambda: not any(item.reader.pids for item in watched))
