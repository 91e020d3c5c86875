"""Detect hung processes by file: a process touches a file as long as it works; its supervisor restarts it otherwise.

The supervisor (`vigil up`, or `python -m portal.run.watched` around one service) names the file in
VIGIL_HEARTBEAT_FILE. A thread touches it, so that a worker in a task that takes minutes does not count as hung; but
only while the main thread runs, so that a hung one does. A stopped process (SIGSTOP, frozen container) runs no thread.

The supervisor measures with its own monotonic clock when the file last changed, so that setting a clock changes
nothing. Imports no Django.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

FILE = "VIGIL_HEARTBEAT_FILE"
INTERVAL_S = 1.0
# Even when idle, the main thread wakes up this often: a worker's wait for a task lasts 20 s.
IDLE_S = 30.0
# A task may wait in one call for this long, for example in a statement that removes a night's worth of old rows.
CALL_S = 300.0
# No task takes longer: verifying the largest checkpoint that is read here (20 GB) takes 17 minutes at 20 MB/s.
TASK_S = 1800.0
# A process that is just starting on a busy machine has no heartbeat yet.
START_S = 120.0
# A supervisor that was itself paused for longer than this does not count that time.
PAUSED_S = 5.0
STACKS = signal.SIGUSR2
"""Signal on which a process writes the stacks of all its threads to its log; sent before SIGKILL."""


class Pulse(threading.Thread):
    """Touches this process's file while the main thread runs; start it from the main thread."""

    def __init__(self, path: str | None = None) -> None:
        super().__init__(name="pulse", daemon=True)
        self.path = path if path is not None else os.environ.get(FILE, "")
        self._main = time.pthread_getcpuclockid(threading.main_thread().ident or 0)
        self._task: tuple[str, float] | None = None
        self._cpu = -1.0
        self._ran_at = time.monotonic()
        faulthandler.register(STACKS, all_threads=True)

    def begin(self, task: str) -> None:
        """Record that a task starts; called by the main thread."""
        self._task = (task, time.monotonic())

    def end(self) -> None:
        """Record that the task has ended."""
        self._task = None

    @property
    def task(self) -> tuple[str, float]:
        """Return the running task and its seconds so far; "" if none runs."""
        task = self._task
        return (task[0], time.monotonic() - task[1]) if task else ("", 0.0)

    def run(self) -> None:
        while True:
            if self.is_alive_by_progress() and self.path:
                touch(self.path)
            time.sleep(INTERVAL_S)

    def is_alive_by_progress(self) -> bool:
        """Return whether the main thread has run recently: every wake-up uses CPU time."""
        now, cpu = time.monotonic(), time.clock_gettime(self._main)
        if cpu != self._cpu:
            self._cpu, self._ran_at = cpu, now
        name, seconds = self.task
        return now - self._ran_at < (CALL_S if name else IDLE_S) and seconds < TASK_S


def touch(path: str) -> None:
    """Touch the file; a full or missing disk must not end the process."""
    with suppress(OSError):
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600))
        os.utime(path)


@dataclass
class Watch:
    """Measures for how long a process has had no heartbeat."""

    limit_s: float
    path: Path | None = None
    answers: Callable[[], bool] | None = None  # instead of the file: pings a server that is not ours (Redis)
    every_s: float = 0.0  # interval of these pings
    _last_mark: object = None
    _alive_at: float = 0.0
    _checked_at: float = 0.0
    _pinged_at: float = 0.0
    _has_beaten: bool = field(default=False)

    def restart(self) -> None:
        """Reset for a new process."""
        self._alive_at = self._checked_at = time.monotonic()
        self._last_mark, self._has_beaten = self._mark(), False

    def silent_s(self) -> float:
        """Check once; return for how many seconds there has been no heartbeat."""
        now = time.monotonic()
        if now - self._checked_at > PAUSED_S:  # the watcher itself was stopped or suspended
            self._alive_at += now - self._checked_at
        self._checked_at = now
        if self._shows_life(now):
            self._alive_at, self._has_beaten = now, True
        return now - self._alive_at

    def is_over(self) -> bool:
        """Return whether it has been silent for too long."""
        return self.silent_s() > (self.limit_s if self._has_beaten else max(self.limit_s, START_S))

    def _shows_life(self, now: float) -> bool:
        if self.answers is not None:
            if now - self._pinged_at < self.every_s:
                return False
            answered = self.answers()
            self._pinged_at = now
            return answered
        mark, self._last_mark = self._last_mark, self._mark()
        return self._last_mark != mark

    def _mark(self) -> object:
        if self.path is None:
            return None
        try:
            return self.path.stat().st_mtime_ns
        except OSError:
            return None
