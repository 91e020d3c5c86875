"""What the machine does: processor, memory, disks, network. Rates are a second, between two looks."""

from __future__ import annotations

import ctypes
import time
from dataclasses import dataclass, field
from pathlib import Path

from nodes.agent import disks, network, proc

KIB = 1024
BLOCKED_SECONDS = 60.0  # between two counts, for which every process is looked at
MOST_VALUES = 200
PROC, SYS = Path("/proc"), Path("/sys")
Values = dict[str, float | None]


@dataclass
class Host:
    """`proc` and `sys` are where the kernel's files are."""

    proc: Path = PROC
    sys: Path = SYS
    _counts: dict[str, float] = field(default_factory=dict)
    _counted_at: float = 0.0
    _cpu: tuple[int, int] | None = None
    _blocked: tuple[float, int] | None = None

    def look(self) -> Values:
        """By the contract's names (protocols.md §11); a rate only from the second look on."""
        told: Values = {
            **self._load(),
            **_memory(self.proc),
            "uptime_s": round(proc.uptime(self.proc)),
            "blocked_processes": self._blocked_processes(),
            "clock_offset_ms": clock_offset_ms(),
            **self._rates(),
            **network.infiniband_state(self.sys),
            **disks.room(self.proc),
        }
        return dict(list(told.items())[:MOST_VALUES])

    def _load(self) -> Values:
        load = proc.read(self.proc / "loadavg", 128).split()
        try:
            load_1: float | None = float(load[0])
        except (ValueError, IndexError):
            load_1 = None
        return {"cpu_percent": self._cpu_percent(), "load_1": load_1}

    def _cpu_percent(self) -> float | None:
        """Of all processors together, since the last look."""
        words = proc.read(self.proc / "stat", 1024).partition("\n")[0].split()
        times = [int(word) for word in words[1:9] if word.isdigit()]
        if len(times) < 5:
            return None
        before, self._cpu = self._cpu, (sum(times), times[3] + times[4])
        if before is None or self._cpu[0] <= before[0]:
            return None
        idle = (self._cpu[1] - before[1]) / (self._cpu[0] - before[0])
        return round(100.0 * min(max(1.0 - idle, 0.0), 1.0), 1)

    def _rates(self) -> Values:
        """A counter that went back has begun anew, and tells nothing this time."""
        counts = {**network.traffic(self.sys), **network.infiniband_traffic(self.sys), **disks.traffic(self.proc)}
        before, self._counts = self._counts, counts
        now = time.monotonic()
        seconds, self._counted_at = now - self._counted_at, now
        known = {name: count - before[name] for name, count in counts.items() if name in before}
        return {name: round(grown / seconds, 3) for name, grown in known.items() if grown >= 0 and seconds > 0}

    def _blocked_processes(self) -> float:
        now = time.monotonic()
        if self._blocked is None or now - self._blocked[0] >= BLOCKED_SECONDS:
            self._blocked = (now, len(proc.blocked(self.proc)))
        return float(self._blocked[1])


def _memory(root: Path) -> Values:
    """What programs could not have is used; what the kernel keeps of files is not."""
    kib = memory_kib(root)
    total, left = kib.get("MemTotal"), kib.get("MemAvailable")
    if total is None or left is None:
        return {}
    return {"memory_used_mib": round((total - left) / KIB, 1), "memory_total_mib": round(total / KIB, 1)}


def memory_kib(root: Path) -> dict[str, int]:
    lines = (line.split() for line in proc.read(root / "meminfo").splitlines())
    return {words[0].rstrip(":"): int(words[1]) for words in lines if len(words) >= 2 and words[1].isdigit()}


class _Timex(ctypes.Structure):
    """struct timex of the kernel, as far as it is read."""

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
    """How far the clock is off by the kernel's own word; None where nobody sets it by another."""
    told = _Timex()
    try:
        state = ctypes.CDLL(None).adjtimex(ctypes.byref(told))
    except (OSError, AttributeError):
        return None
    if state < 0 or told.status & _UNSYNCHRONISED:
        return None
    return round(float(told.offset / (1e6 if told.status & _NANOSECONDS else 1e3)), 3)
