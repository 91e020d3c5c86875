"""Measure the resources that the job's processes use on this node: cores and memory."""

from __future__ import annotations

import time
from contextlib import suppress

import psutil

from training.units import GIB


class ResourceMeter:
    """Measures between two samples. Cores: CPU seconds per second; memory: resident, shared pages counted once."""

    def __init__(self) -> None:
        self._cpu: dict[tuple[int, float], float] = {}
        self._sampled_at = time.monotonic()

    def sample(self, processes: list[psutil.Process]) -> dict[str, float]:
        now = time.monotonic()
        cpu: dict[tuple[int, float], float] = {}
        memory = 0
        for process in processes:
            with suppress(psutil.Error):
                with process.oneshot():
                    times, found = process.cpu_times(), process.memory_info()
                    cpu[process.pid, process.create_time()] = times.user + times.system
                # Every rank maps the same libraries and shards: shared memory counts for the first process only.
                memory += found.rss - found.shared if memory else found.rss
        # A new process began at zero; the last CPU time of a process that has ended is unknown.
        used = sum(seconds - self._cpu.get(key, 0.0) for key, seconds in cpu.items())
        elapsed = max(now - self._sampled_at, 1e-6)
        self._cpu, self._sampled_at = cpu, now
        return {"cpu_cores": used / elapsed, "memory_gib": memory / GIB}
