"""Inspect this node after an incarnation that ended badly: what it ran out of, and what its kernel logged.

Values that are quick to read are read here, while the remaining ranks still use them. A separate process does the rest
(training.launch.node_report); only the attempt's end waits for it, for up to five seconds after its start. The next
incarnation starts meanwhile.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any, cast

from training.launch import control_group
from training.launch.attempt import Attempt
from training.launch.control_group import Memory
from training.launch.disk_reserve import DiskReserve
from training.launch.incarnation import Incarnation
from training.launch.node_report import FOLDER, SECONDS
from training.launch.plan import LaunchPlan
from training.units import MIB

SHM = "/dev/shm"
RESERVE = f"{FOLDER}/.reserve"


class NodeInspection:
    """`begin` with an incarnation, `sample` while it runs, `measure` before its ranks are killed, `start` after."""

    def __init__(self, plan: LaunchPlan, attempt: Attempt) -> None:
        self._plan, self._attempt = plan, attempt
        self._reserve = DiskReserve(attempt.folder, f"{RESERVE}.{plan.node_rank}")
        self._has_others: bool | None = None
        self._before: Memory | None = None
        self._shm_peak_mib = 0
        self._measured: dict[str, Any] | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._deadline = 0.0

    @property
    def pid(self) -> int | None:
        """The process's id while it runs, else None."""
        return self._process.pid if self._process and self._process.poll() is None else None

    def begin(self) -> None:
        """Read the counters that later readings are compared with."""
        self._reserve.reserve()
        if self._has_others is None:
            self._has_others = control_group.has_others()
        self._before, self._shm_peak_mib = control_group.read(), 0

    def sample(self) -> None:
        """Track the peak of /dev/shm: it is full only for a moment, and freed with the process that filled it."""
        self._shm_peak_mib = max(self._shm_peak_mib, _shm().get("used_mib", 0))

    def measure(self) -> None:
        """Measure the memory in use, before the ranks are killed and release it."""
        self.sample()
        measured: dict[str, Any] = {}
        if shm := _shm():
            measured["shm"] = {"total_mib": shm["total_mib"], "most_mib": self._shm_peak_mib}
        if (now := control_group.read()) is not None:
            before = self._before.oom_kills if self._before and self._before.path == now.path else None
            since = None if before is None or now.oom_kills is None else max(0, now.oom_kills - before)
            measured["memory"] = {**asdict(now), "oom_kills": since, "has_others": bool(self._has_others)}
        self._measured = measured

    def start(self, incarnation: Incarnation, buses: list[str]) -> None:
        """Start the report after `measure`, unless the previous one still runs.

        `buses`: PCI bus ids of the job's GPUs.
        """
        measured, self._measured = self._measured, None
        if measured is None or self.pid is not None:
            return
        request = {
            **measured,
            "folder": str(self._attempt.folder),
            "reserve": f"{RESERVE}.{self._plan.node_rank}",
            "incarnation": incarnation.number,
            "node": self._plan.node,
            "node_rank": self._plan.node_rank,
            "gpus": buses,
            "asks_driver": self._plan.gpus_per_node > 0,
        }
        with suppress(OSError), _log(self._attempt.folder) as log:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "training.launch.node_report"],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                process_group=0,
            )
            self._deadline = time.monotonic() + SECONDS
            with cast(IO[bytes], self._process.stdin) as file:
                file.write(json.dumps(request).encode())

    def finish(self) -> None:
        """Wait for the report until its time limit, then kill it."""
        while self.pid and time.monotonic() < self._deadline:
            time.sleep(0.02)
        if self.pid:
            assert self._process is not None
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
        self._reserve.release()


def _log(folder: Path) -> IO[bytes]:
    """Open the report's error log; /dev/null where the disk is full."""
    with suppress(OSError):
        return open(folder / "logs" / "look.log", "ab")
    return open(os.devnull, "wb")


def _shm() -> dict[str, int]:
    with suppress(OSError):
        found = os.statvfs(SHM)
        total = found.f_blocks * found.f_frsize
        return {"total_mib": total // MIB, "used_mib": (total - found.f_bfree * found.f_frsize) // MIB}
    return {}
