"""Signs of life: a process touches a file as long as it works, and whoever started it restarts it when that stops.

Whoever watches (`vigil up`, or `python -m portal.run.watched` around one service) names it in VIGIL_HEARTBEAT_FILE. A
thread touches it, so that a worker in a task that takes minutes is not taken for dead; but only while the main thread
is seen to run, so that one that hangs is. A stopped process (SIGSTOP, a frozen container) runs no thread at all.

The watcher compares by its own monotonic clock when it last saw the file change: a clock that is set changes nothing.
Imports no Django.
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
# Even where nothing is to be done the main thread wakes up this often: a worker's wait for a task lasts 20 s.
IDLE_S = 30.0
# A task may wait in one call for this long, such as one statement that removes a night's worth of old rows.
CALL_S = 300.0
# No task is longer: verifying the largest checkpoint that is read here (20 GB) takes 17 minutes at 20 MB/s.
TASK_S = 1800.0
# A process that is just starting on a busy machine has shown no sign yet.
START_S = 120.0
# A watcher that was itself held for longer than this has not watched, and counts that time against nobody.
HELD_S = 5.0
STACKS = signal.SIGUSR2
"""On this signal a process writes the stacks of all its threads to its log: it is sent before SIGKILL."""


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
        """A task begins; called by the main thread."""
        self._task = (task, time.monotonic())

    def end(self) -> None:
        """It has ended."""
        self._task = None

    @property
    def task(self) -> tuple[str, float]:
        """The task that is running and for how many seconds; "" where none is."""
        task = self._task
        return (task[0], time.monotonic() - task[1]) if task else ("", 0.0)

    def run(self) -> None:
        while True:
            if self.is_alive_by_progress() and self.path:
                touch(self.path)
            time.sleep(INTERVAL_S)

    def is_alive_by_progress(self) -> bool:
        """Return whether the main thread has run lately: it has used CPU time, as whatever wakes up at all does."""
        now, cpu = time.monotonic(), time.clock_gettime(self._main)
        if cpu != self._cpu:
            self._cpu, self._ran_at = cpu, now
        name, seconds = self.task
        return now - self._ran_at < (CALL_S if name else IDLE_S) and seconds < TASK_S


def touch(path: str) -> None:
    """Note that this process works; a full or missing disk must not end it."""
    with suppress(OSError):
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600))
        os.utime(path)


@dataclass
class Watch:
    """How long a process has shown no sign of life, as its watcher saw it."""

    limit_s: float
    path: Path | None = None
    answers: Callable[[], bool] | None = None  # instead of the file: asks a server that is not ours (Redis)
    every_s: float = 0.0  # how often it is asked
    _seen: object = None
    _alive_at: float = 0.0
    _looked_at: float = 0.0
    _asked_at: float = 0.0
    _has_beaten: bool = field(default=False)

    def restart(self) -> None:
        """A new process begins."""
        self._alive_at = self._looked_at = time.monotonic()
        self._seen, self._has_beaten = self._mark(), False

    def silent_s(self) -> float:
        """Look once; return for how many seconds there was no sign."""
        now = time.monotonic()
        if now - self._looked_at > HELD_S:  # the watcher itself was stopped or suspended
            self._alive_at += now - self._looked_at
        self._looked_at = now
        if self._shows_life(now):
            self._alive_at, self._has_beaten = now, True
        return now - self._alive_at

    def is_over(self) -> bool:
        """Return whether it has been silent for too long."""
        return self.silent_s() > (self.limit_s if self._has_beaten else max(self.limit_s, START_S))

    def _shows_life(self, now: float) -> bool:
        if self.answers is not None:
            if now - self._asked_at < self.every_s:
                return False
            answered = self.answers()
            self._asked_at = now
            return answered
        mark, self._seen = self._seen, self._mark()
        return self._seen != mark

    def _mark(self) -> object:
        if self.path is None:
            return None
        try:
            return self.path.stat().st_mtime_ns
        except OSError:
            return None
