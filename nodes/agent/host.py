"""Sample the host: CPU, memory, disks, network. Rates are per second, between two samples."""

from __future__ import annotations

import ctypes
import time
from dataclasses import dataclass, field
from pathlib import Path

from nodes.agent import disks, network, proc

KIB = 1024
BLOCKED_SECONDS = 60.0  # between two counts, each of which reads every process
MAX_VALUES = 200
PROC, SYS = Path("/proc"), Path("/sys")
Values = dict[str, float | None]


@dataclass
class HostSampler:
    """Samples the host. `proc` and `sys` are where the kernel's files are."""

    proc: Path = PROC
    sys: Path = SYS
    _counts: dict[str, float] = field(default_factory=dict)
    _counted_at: float = 0.0
    _cpu: tuple[int, int] | None = None
    _blocked: tuple[float, int] | None = None

    def sample(self) -> Values:
        """Return the values by their names in protocols.md §11; rates from the second sample on."""
        values: Values = {
            **self._load(),
            **_memory(self.proc),
            "uptime_s": round(proc.uptime(self.proc)),
            "blocked_processes": self._blocked_processes(),
            "clock_offset_ms": clock_offset_ms(),
            **self._rates(),
            **network.infiniband_state(self.sys),
            **disks.room(self.proc),
        }
        return dict(list(values.items())[:MAX_VALUES])

    def _load(self) -> Values:
        load = proc.read(self.proc / "loadavg", 128).split()
        try:
            load_1: float | None = float(load[0])
        except (ValueError, IndexError):
            load_1 = None
        return {"cpu_percent": self._cpu_percent(), "load_1": load_1}

    def _cpu_percent(self) -> float | None:
        """Return the use of all processors since the last sample."""
        words = proc.read(self.proc / "stat", 1024).partition("\n")[0].split()
        times = [int(word) for word in words[1:9] if word.isdigit()]
        if len(times) < 5:
            return None
        previous, self._cpu = self._cpu, (sum(times), times[3] + times[4])
        if previous is None or self._cpu[0] <= previous[0]:
            return None
        idle = (self._cpu[1] - previous[1]) / (self._cpu[0] - previous[0])
        return round(100.0 * min(max(1.0 - idle, 0.0), 1.0), 1)

    def _rates(self) -> Values:
        """Return rates; a counter that went backwards was reset, and has no rate this time."""
        counts = {**network.traffic(self.sys), **network.infiniband_traffic(self.sys), **disks.traffic(self.proc)}
        previous, self._counts = self._counts, counts
        now = time.monotonic()
        seconds, self._counted_at = now - self._counted_at, now
        increases = {name: count - previous[name] for name, count in counts.items() if name in previous}
        return {name: round(grown / seconds, 3) for name, grown in increases.items() if grown >= 0 and seconds > 0}

    def _blocked_processes(self) -> float:
        now = time.monotonic()
        if self._blocked is None or now - self._blocked[0] >= BLOCKED_SECONDS:
            self._blocked = (now, len(proc.blocked(self.proc)))
        return float(self._blocked[1])


def _memory(root: Path) -> Values:
    """Return used and total memory; the kernel's reclaimable file cache does not count as used."""
    kib = memory_kib(root)
    total, available = kib.get("MemTotal"), kib.get("MemAvailable")
    if total is None or available is None:
        return {}
    return {"memory_used_mib": round((total - available) / KIB, 1), "memory_total_mib": round(total / KIB, 1)}


def memory_kib(root: Path) -> dict[str, int]:
    lines = (line.split() for line in proc.read(root / "meminfo").splitlines())
    return {words[0].rstrip(":"): int(words[1]) for words in lines if len(words) >= 2 and words[1].isdigit()}


class _Timex(ctypes.Structure):
    """The kernel's struct timex, as far as it is read."""

    _fields_ = [
        ("modes", ctypes.c_uint),
        ("offset", ctypes.c_long),
        ("freq", ctypes.c_long),
        ("maxerror", ctypes.c_long),
        ("esterror", ctypes.c_long),
        ("status", ctypes.c_int),
        ("rest", ctypes.c_char * 256),
    ]


_UNSYNCHRONISED, _NANOSECONDS = 0x0040, 0x2000


def clock_offset_ms() -> float | None:
    """Return the clock's offset as the kernel estimates it; None if no time daemon disciplines it."""
    timex = _Timex()
    try:
        state = ctypes.CDLL(None).adjtimex(ctypes.byref(timex))
    except (OSError, AttributeError):
        return None
    if state < 0 or timex.status & _UNSYNCHRONISED:
        return None
    return round(float(timex.offset / (1e6 if timex.status & _NANOSECONDS else 1e3)), 3)
