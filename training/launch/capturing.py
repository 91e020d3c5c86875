"""The captured environment, made beside the ranks: one process of little weight, given up when it takes too long."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress

from training.launch.attempt import Attempt
from training.launch.environment import RankCommand
from training.launch.plan import Plan
from training.launch.ranks import child_setup
from training.launch.stop import STOP_SIGNALS

AFTER_SECONDS = 3.0  # of the ranks' start: while they load, every core is theirs
SECONDS = 60.0  # for it in all: on a busy node it hardly gets any time
LAST_SECONDS = 5.0  # to finish in, once the ranks are gone: a run that failed at once is the one to know about
GPU_SECONDS = 1.0  # of these for the GPUs, the rest being written
KILLED_SECONDS = 1.0
LEAST_NICE = 19
FILE = "environment.json"


class Capturing:
    """`begin` once the ranks run, `finish` when they have ended; nothing that goes wrong here reaches the attempt."""

    def __init__(self, plan: Plan, attempt: Attempt, command: RankCommand) -> None:
        self._plan, self._attempt, self._command = plan, attempt, command
        self._process: subprocess.Popen[bytes] | None = None
        self._due = self._deadline = 0.0
        self._killed = False

    @property
    def pid(self) -> int | None:
        """While it runs."""
        return self._process.pid if self._process and self._process.poll() is None else None

    def begin(self) -> None:
        """Begin once an attempt, on the first node: a little later, or with the end if that comes first."""
        if not self._due and self._plan.is_first and not os.path.exists(self._attempt.folder / FILE):
            self._due = time.monotonic() + AFTER_SECONDS

    def tend(self, *, at_once: bool = False) -> None:
        if self._due and not self._deadline and (at_once or time.monotonic() > self._due):
            self._deadline = time.monotonic() + SECONDS
            with suppress(OSError):
                self._start()
        if self._deadline and time.monotonic() > self._deadline and self.pid and not self._killed:
            self._kill()

    def finish(self) -> None:
        self.tend(at_once=True)
        if self._process is None:
            return
        until = min(time.monotonic() + LAST_SECONDS, self._deadline)
        while self.pid and time.monotonic() < until:
            if os.path.exists(self._attempt.folder / FILE):  # all is written but the GPUs
                until = min(until, time.monotonic() + GPU_SECONDS)
                with suppress(subprocess.TimeoutExpired):
                    self._process.wait(GPU_SECONDS)
            time.sleep(0.02)
        if self.pid:
            self._kill()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(KILLED_SECONDS)

    def _start(self) -> None:
        python, path = self._command.arguments[0], self._command.environment.get("PYTHONPATH", "")
        arguments = [
            sys.executable,
            "-P",
            "-m",
            "training.provenance.capture",
            str(self._plan.run_dir),
            str(self._attempt.folder),
        ]
        leave_signals = child_setup(STOP_SIGNALS)

        def setup() -> None:
            leave_signals()
            os.nice(LEAST_NICE)

        with open(self._attempt.folder / "logs" / "capture.log", "ab") as log:
            self._process = subprocess.Popen(
                [*arguments, python, path],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                process_group=0,
                preexec_fn=setup,
            )

    def _kill(self) -> None:
        """It and what it asks, which is in its group: once, and nobody waits here: it may be one that cannot die."""
        assert self._process is not None
        self._killed = True
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
