"""Run the shipper process alongside the ranks: restarted when it dies, given a last moment at the end."""

from __future__ import annotations

import subprocess
import sys
import time
from contextlib import suppress

from training.launch.attempt import Attempt
from training.launch.plan import LaunchPlan
from training.launch.ranks import child_setup
from training.launch.stop import STOP_SIGNALS

RESTART_SECONDS = (0.2, 10.0)  # first and longest wait before the next start


class ShipperProcess:
    """`poll` often; `drain` once. The shipper ends when stdin closes: signals to the whole job must not end it."""

    def __init__(self, plan: LaunchPlan, attempt: Attempt) -> None:
        self._plan, self._attempt = plan, attempt
        self._process: subprocess.Popen[bytes] | None = None
        self._wait, self._next_start = RESTART_SECONDS[0], 0.0

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    def poll(self) -> str | None:
        """Start the shipper if it is not running; return a message for the log, if any."""
        if self._process is not None and (code := self._process.poll()) is not None:
            self._process = None
            self._delay_restart()
            return f"the shipper ended with {code}; starting it again"
        if self._process is None and time.monotonic() >= self._next_start:
            try:
                self._start()
            except OSError as error:  # out of memory or processes: the ranks continue without it
                self._delay_restart()
                return f"the shipper cannot be started: {error}"
        return None

    def _delay_restart(self) -> None:
        self._next_start = time.monotonic() + self._wait
        self._wait = min(self._wait * 2, RESTART_SECONDS[1])

    def drain(self) -> None:
        """Let it post what is left, for a limited time as the nodes wait. The portal reads the rest from disk."""
        self.poll()
        if self._process is None:
            return
        with suppress(OSError):
            assert self._process.stdin is not None
            self._process.stdin.close()
        try:
            self._process.wait(self._plan.drain_seconds + 2)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _start(self) -> None:
        arguments = [sys.executable, "-P", "-m", "training.shipper", str(self._plan.run_dir), str(self._attempt.folder)]
        arguments += ["--node", self._plan.node, "--drain", str(self._plan.drain_seconds)]
        with open(self._attempt.folder / "logs" / f"shipper.{self._plan.node_rank}.log", "ab") as log:
            self._process = subprocess.Popen(
                arguments,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                process_group=0,
                preexec_fn=child_setup(STOP_SIGNALS),
            )
