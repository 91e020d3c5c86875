"""Record the environment of an attempt in a low-priority process alongside the ranks, with a time limit."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress

from training.launch.attempt import Attempt
from training.launch.environment import RankCommand
from training.launch.plan import LaunchPlan
from training.launch.ranks import child_setup
from training.launch.stop import STOP_SIGNALS

AFTER_SECONDS = 3.0  # delay after the ranks' start: they need every core while they load
TIMEOUT_SECONDS = 60.0  # in total: on a busy node the process hardly gets any CPU time
FINISH_SECONDS = 5.0  # after the ranks have ended: a run that failed at once is the one worth recording
GPU_SECONDS = 1.0  # of these, for the GPUs, once everything else is written
KILL_SECONDS = 1.0
LOWEST_PRIORITY = 19
FILE = "environment.json"


class EnvironmentCapture:
    """`begin` once the ranks run, `finish` when they have ended. No error here affects the attempt."""

    def __init__(self, plan: LaunchPlan, attempt: Attempt, command: RankCommand) -> None:
        self._plan, self._attempt, self._command = plan, attempt, command
        self._process: subprocess.Popen[bytes] | None = None
        self._due = self._deadline = 0.0
        self._killed = False

    @property
    def pid(self) -> int | None:
        """The process's id while it runs, else None."""
        return self._process.pid if self._process and self._process.poll() is None else None

    def begin(self) -> None:
        """Schedule the capture, once per attempt and on the first node only: a few seconds from now, or in `finish`."""
        if not self._due and self._plan.is_first and not os.path.exists(self._attempt.folder / FILE):
            self._due = time.monotonic() + AFTER_SECONDS

    def poll(self) -> None:
        """Start the capture when it is due, and kill it at its time limit."""
        if self._due and not self._deadline and time.monotonic() > self._due:
            self._deadline = time.monotonic() + TIMEOUT_SECONDS
            with suppress(OSError):
                self._start(LOWEST_PRIORITY)
        if self._deadline and time.monotonic() > self._deadline and self.pid and not self._killed:
            self._kill()

    def finish(self) -> None:
        """Wait for the capture a few seconds, begun again at normal priority: no rank is left that it could disturb.

        At the lowest priority it starves on a node where other jobs need every core.
        """
        if not self._due:
            return
        is_written = os.path.exists(self._attempt.folder / FILE)  # then only the GPUs are missing
        if self._process is None or (self.pid and not is_written):
            self._stop()
            self._deadline = self._deadline or time.monotonic() + TIMEOUT_SECONDS
            self._killed = False
            with suppress(OSError):
                self._start(priority=0)
        if self._process is None:
            return
        until = min(time.monotonic() + FINISH_SECONDS, self._deadline)
        while self.pid and time.monotonic() < until:
            if os.path.exists(self._attempt.folder / FILE):  # everything but the GPUs is written
                until = min(until, time.monotonic() + GPU_SECONDS)
                with suppress(subprocess.TimeoutExpired):
                    self._process.wait(GPU_SECONDS)
            time.sleep(0.02)
        self._stop()

    def _start(self, priority: int) -> None:
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
            os.nice(priority)

        with open(self._attempt.folder / "logs" / "capture.log", "ab") as log:
            self._process = subprocess.Popen(
                [*arguments, python, path],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                process_group=0,
                preexec_fn=setup,
            )

    def _stop(self) -> None:
        """Kill the process if it runs, and wait for its end a moment."""
        if self._process is not None and self.pid:
            self._kill()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(KILL_SECONDS)

    def _kill(self) -> None:
        """Kill the process and its children once. It may be unkillable (held by a driver), so nobody waits here."""
        assert self._process is not None
        self._killed = True
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
