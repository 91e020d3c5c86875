"""What the job's processes on this node use: cores, memory, and its GPUs where there are any."""

from __future__ import annotations

import ctypes
import time
from contextlib import suppress

import psutil

from training.units import GIB


class Meter:
    """Measures between two looks. Cores are CPU seconds a second; memory is resident, what is shared counted once."""

    def __init__(self, *, gpus: int = 0, visible: str = "") -> None:
        self._cpu: dict[tuple[int, float], float] = {}
        self._at = time.monotonic()
        self._gpus = Gpus(gpus, visible) if gpus else None

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
        return {"cpu_cores": used / elapsed, "memory_gib": memory / GIB, **(self._gpus.look() if self._gpus else {})}


class _Utilization(ctypes.Structure):
    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))


class _Memory(ctypes.Structure):
    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


def open_nvml() -> ctypes.CDLL | None:
    """NVIDIA's library, ready to be asked, if the machine has it and a driver that answers."""
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    return library if library.nvmlInit_v2() == 0 else None


class Gpus:
    """The job's GPUs through NVIDIA's own library, if the machine has it: mean utilisation, used memory, power."""

    def __init__(self, count: int, visible: str) -> None:
        self.handles: list[ctypes.c_void_p] = []
        self.library = open_nvml()
        if self.library is None:
            return
        for name in [part.strip() for part in visible.split(",") if part.strip()] or [str(i) for i in range(count)]:
            handle = ctypes.c_void_p()
            if name.isdecimal():
                failed = self.library.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(int(name)), ctypes.byref(handle))
            else:
                failed = self.library.nvmlDeviceGetHandleByUUID(name.encode(), ctypes.byref(handle))
            if not failed:
                self.handles.append(handle)

    def look(self) -> dict[str, float]:
        if not self.handles or self.library is None:
            return {}
        use, memory, power = _Utilization(), _Memory(), ctypes.c_uint()
        percent, used, watts = [], [], []
        for handle in self.handles:
            if self.library.nvmlDeviceGetUtilizationRates(handle, ctypes.byref(use)) == 0:
                percent.append(use.gpu)
            if self.library.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory)) == 0:
                used.append(memory.used / GIB)
            if self.library.nvmlDeviceGetPowerUsage(handle, ctypes.byref(power)) == 0:
                watts.append(power.value / 1000)
        # What none of them tells is left out: a slice of a GPU (MIG) knows neither its use nor its power.
        told = {"gpu_percent": sum(percent) / len(percent)} if percent else {}
        return told | {name: sum(of) for name, of in (("gpu_memory_gib", used), ("gpu_watts", watts)) if of}
