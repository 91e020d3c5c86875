"""What the job's processes on this node use: cores and memory."""

from __future__ import annotations

import time
from contextlib import suppress

import psutil

from training.units import GIB


class Meter:
    """Measures between two looks. Cores are CPU seconds a second; memory is resident, what is shared counted once."""

    def __init__(self) -> None:
        self._cpu: dict[tuple[int, float], float] = {}
        self._at = time.monotonic()

    def look(self, processes: list[psutil.Process]) -> dict[str, float]:
        now = time.monotonic()
        cpu: dict[tuple[int, float], float] = {}
        memory = 0
        for process in processes:
            with suppress(psutil.Error):
                with process.oneshot():
                    times, found = process.cpu_times(), process.memory_info()
                    cpu[process.pid, process.create_time()] = times.user + times.system
                # Every rank maps the same libraries and shards: of what is shared, only the first one's is counted.
                memory += found.rss - found.shared if memory else found.rss
        # A process that is new since the last look began at zero; of one that has gone, the rest is unknown.
        used = sum(seconds - self._cpu.get(key, 0.0) for key, seconds in cpu.items())
        elapsed = max(now - self._at, 1e-6)
        self._cpu, self._at = cpu, now
        return {"cpu_cores": used / elapsed, "memory_gib": memory / GIB}
