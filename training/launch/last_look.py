"""A last look at this node after an incarnation that ended badly: what it was out of, and what its kernel says.

What takes no time is read here, while the ranks that are left still hold it; a process beside does the rest
(training.launch.looking), and nobody waits for it but the attempt's end, for what is left of five seconds. The next
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
from training.launch.incarnation import Incarnation
from training.launch.kept import Kept
from training.launch.looking import FOLDER, SECONDS
from training.launch.plan import Plan

SHM = "/dev/shm"
RESERVE = f"{FOLDER}/.reserve"
MIB = 1 << 20


class LastLook:
    """`begin` with an incarnation, `sample` while it runs, `glance` before its ranks are killed, `start` after."""

    def __init__(self, plan: Plan, attempt: Attempt) -> None:
        self._plan, self._attempt = plan, attempt
        self._kept = Kept(attempt.folder, f"{RESERVE}.{plan.node_rank}")
        self._has_others: bool | None = None
        self._before: Memory | None = None
        self._shm_most = 0
        self._glanced: dict[str, Any] | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._deadline = 0.0

    @property
    def pid(self) -> int | None:
        """While it runs."""
        return self._process.pid if self._process and self._process.poll() is None else None

    def begin(self) -> None:
        """What later looks are compared with."""
        self._kept.reserve()
        if self._has_others is None:
            self._has_others = control_group.has_others()
        self._before, self._shm_most = control_group.read(), 0

    def sample(self) -> None:
        """What is full for a moment only, and given back with the process that filled it."""
        self._shm_most = max(self._shm_most, _shm().get("used_mib", 0))

    def glance(self) -> None:
        """What the ranks hold of memory, while they do."""
        self.sample()
        found: dict[str, Any] = {}
        if shm := _shm():
            found["shm"] = {"total_mib": shm["total_mib"], "most_mib": self._shm_most}
        if (now := control_group.read()) is not None:
            before = self._before.oom_kills if self._before and self._before.path == now.path else None
            since = None if before is None or now.oom_kills is None else max(0, now.oom_kills - before)
            found["memory"] = {**asdict(now), "oom_kills": since, "has_others": bool(self._has_others)}
        self._glanced = found

    def start(self, incarnation: Incarnation, buses: list[str]) -> None:
        """After a glance, let the rest be looked at, unless the look before has not ended. `buses`: of its GPUs."""
        glanced, self._glanced = self._glanced, None
        if glanced is None or self.pid is not None:
            return
        asked = {
            **glanced,
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
                [sys.executable, "-P", "-m", "training.launch.looking"],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                process_group=0,
            )
            self._deadline = time.monotonic() + SECONDS
            with cast(IO[bytes], self._process.stdin) as file:
                file.write(json.dumps(asked).encode())

    def finish(self) -> None:
        """Wait for one that has not ended, as long as it may take."""
        while self.pid and time.monotonic() < self._deadline:
            time.sleep(0.02)
        if self.pid:
            assert self._process is not None
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
        self._kept.release()


def _log(folder: Path) -> IO[bytes]:
    """Where it tells of its own errors: nowhere, if there is no room for a file more."""
    with suppress(OSError):
        return open(folder / "logs" / "look.log", "ab")
    return open(os.devnull, "wb")


def _shm() -> dict[str, int]:
    with suppress(OSError):
        found = os.statvfs(SHM)
        total = found.f_blocks * found.f_frsize
        return {"total_mib": total // MIB, "used_mib": (total - found.f_bfree * found.f_frsize) // MIB}
    return {}
