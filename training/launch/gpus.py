"""The job's GPUs on this node, as a process beside the ranks tells of them (gpus.reader): what a launcher makes of it.

A call into NVIDIA's driver may hang, unkillably: nobody here makes one, or waits for who makes it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from gpus.reader import OPENING_SECONDS, RETRY_SECONDS, SILENT_SECONDS, Reader
from gpus.told import MOST_GPUS, Answers, Gpu, Lost, Machine, Silent, Told
from training.units import GIB, MIB

NAMED = ("uuid", "index", "minor", "bus", "name", "parent")
MOST_TOLD = 100  # times that the GPUs of one attempt are told

Tell = Callable[..., None]
"""An event of the launcher's: its kind, and what it says."""


def named(count: int, visible: str) -> list[str]:
    """So many GPUs, as CUDA_VISIBLE_DEVICES names them or by their numbers."""
    return ([part.strip() for part in visible.split(",") if part.strip()] or [str(i) for i in range(count)])[:MOST_GPUS]


class Gpus:
    """`tend` often, `look` when a sample is due; neither waits."""

    def __init__(
        self,
        names: list[str],
        *,
        every: float,
        tell: Tell,
        opening_seconds: float = OPENING_SECONDS,
        silent_seconds: float = SILENT_SECONDS,
        retry_seconds: tuple[float, float] = RETRY_SECONDS,
    ) -> None:
        """`names`: as in CUDA_VISIBLE_DEVICES; none: there is nothing to read. `every`: seconds between two looks."""
        self._names, self._every, self._tell = names, max(every, 0.1), tell
        self._reader = Reader(
            names,
            every=self._every,
            opening_seconds=opening_seconds,
            silent_seconds=silent_seconds,
            retry_seconds=retry_seconds,
        )
        self._told: list[dict[str, Any]] = []
        self._tellings = 0

    @property
    def pids(self) -> list[int]:
        """Readers that have not ended."""
        return self._reader.pids

    @property
    def machine(self) -> Machine | None:
        return self._reader.machine

    @property
    def buses(self) -> list[str]:
        """Where its GPUs are, as far as somebody told."""
        return [gpu.bus for gpu in self.machine.gpus if gpu.bus] if self.machine else []

    def tend(self) -> None:
        """Take in what was told, notice silence, start a reader where there is none."""
        for told in self._reader.tend():
            self._hear(told)

    def look(self) -> dict[str, float]:
        """Mean use of the job's GPUs, their memory and power together; nothing where that is not known just now.

        A lost GPU stays in the mean: it does nothing. What none of them tells is left out.
        """
        newest = self._reader.newest
        if newest is None or time.monotonic() - newest.at > 2 * self._every + 1.0:
            return {}
        looks = [look if look is not None else {"gpu_percent": 0} for look in newest.looks]
        percent, memory_mib, watts = (_told(looks, name) for name in ("gpu_percent", "memory_mib", "watts"))
        told = {"gpu_percent": sum(percent) / len(percent)} if percent else {}
        if memory_mib:
            told["gpu_memory_gib"] = sum(memory_mib) * MIB / GIB
        if watts:
            told["gpu_watts"] = float(sum(watts))
        return told

    def close(self) -> None:
        """Whoever still reads is killed, and not waited for."""
        self._reader.close()

    def _hear(self, told: Told) -> None:
        match told:
            case Machine():
                self._tell_which(told)
            case Lost():
                names = {name: value for name, value in _names(told.gpu).items() if name in ("name", "uuid", "bus")}
                self._tell("gpu.lost", gpu=told.gpu.gpu, of=len(self._names), local_rank=told.place, **names)
            case Silent():
                self._tell("gpu.silent", since=told.since, gpus=self._names)
            case Answers():
                self._tell("gpu.answers", since=told.since, seconds=told.seconds)

    def _tell_which(self, machine: Machine) -> None:
        """Once they are known, and again if they are others: Slurm and NVML may count them differently."""
        gpus = [{"local_rank": place, **_names(gpu)} for place, gpu in enumerate(machine.gpus)]
        if gpus != self._told and any(gpu.uuid for gpu in machine.gpus) and self._tellings < MOST_TOLD:
            self._told, self._tellings = gpus, self._tellings + 1
            self._tell("gpus", gpus=gpus)


def _told(looks: list[Mapping[str, int]], name: str) -> list[int]:
    return [look[name] for look in looks if name in look]


def _names(gpu: Gpu) -> dict[str, Any]:
    return {name: value for name, value in gpu.as_told().items() if name in NAMED}
