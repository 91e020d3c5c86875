"""The shipper beside the ranks: its own process, started again when it dies, given a last moment at the end."""

from __future__ import annotations

import subprocess
import sys
import time
from contextlib import suppress

from training.launch.attempt import Attempt
from training.launch.plan import Plan
from training.launch.ranks import child_setup
from training.launch.stop import STOP_SIGNALS

RESTART_SECONDS = (0.2, 10.0)  # first and longest wait before the next start


class Shipping:
    """`tend` often; `drain` once. The shipper reads its end from stdin: signals to the whole job must not end it."""

    def __init__(self, plan: Plan, attempt: Attempt) -> None:
        self._plan, self._attempt = plan, attempt
        self._process: subprocess.Popen[bytes] | None = None
        self._wait, self._next_start = RESTART_SECONDS[0], 0.0

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    def tend(self) -> str | None:
        """Start it where it is not running; what there is to say about it."""
        if self._process is not None and (code := self._process.poll()) is not None:
            self._process = None
            self._put_off()
            return f"the shipper ended with {code}; starting it again"
        if self._process is None and time.monotonic() >= self._next_start:
            try:
                self._start()
            except OSError as error:  # no memory, no process left: the ranks go on without it
                self._put_off()
                return f"the shipper cannot be started: {error}"
        return None

    def _put_off(self) -> None:
        self._next_start = time.monotonic() + self._wait
        self._wait = min(self._wait * 2, RESTART_SECONDS[1])

    def drain(self) -> None:
        """Let it post what is left, for a bounded time: the nodes wait. The portal reads the rest from disk."""
        self.tend()
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
