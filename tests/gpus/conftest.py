"""NVML to read, and readers that are ended whatever comes."""

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
    """What this test starts finds eight GPUs."""
    return stand_in(StandIn(tmp_path), monkeypatch)


def stand_in(library: StandIn, monkeypatch: pytest.MonkeyPatch) -> StandIn:
    for name, value in library.environment.items():
        monkeypatch.setenv(name, value)
    return library


class Watched:
    """A reader as whoever uses it tends it, and what it has told."""

    def __init__(self, names: list[str] | None = None, *, every: float = EVERY, **more: Any) -> None:
        options = {"everything": True, "retry_seconds": (0.05, 0.1), **more}
        self.reader = GpuReader(names, every=every, **options)
        self.told: list[GpuReport] = []

    def all(self, kind: type[T]) -> list[T]:
        self.told += self.reader.poll()
        return [one for one in self.told if isinstance(one, kind)]

    def first(self, kind: type[T]) -> T:
        return until(lambda: self.all(kind))[0]

    def next(self, kind: type[T]) -> T:
        """One that is told from now on."""
        self.all(kind)
        self.told.clear()
        return self.first(kind)

    def looks(self) -> GpuSamples:
        """Of what holds now: the next but one, as a look may have been taken meanwhile."""
        self.next(GpuSamples)
        return self.next(GpuSamples)


# What the stand-in's GPUs do unless it is told otherwise.
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
    for one in watched:
        pids = one.reader.pids
        one.reader.close()
        for pid in pids:
            with suppress(OSError):  # those that a test has made unkillable
                os.kill(pid, signal.SIGKILL)
    until(lambda: not any(one.reader.pids for one in watched))
