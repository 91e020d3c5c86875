"""Run a program now and then without ever waiting for it: a driver or a network file system may block it for good.

One that takes longer than its time-out is killed; while one hangs, no other is started.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress

MAX_BYTES = 65_536


class PolledCommand:
    """A program that runs every `every` seconds. `poll` never waits."""

    def __init__(
        self, command: Sequence[str], *, every: float, timeout: float, name: str = "",
        environment: Mapping[str, str] | None = None,
    ) -> None:  # fmt: skip
        self.problem = ""
        """Why the last try failed; "" if it did not."""
        self.name = name or command[0]
        self._environment = environment
        self._command, self._every, self._timeout = command, every, timeout
        self._child: subprocess.Popen[bytes] | None = None
        self._output = b""
        self._began = -every

    def poll(self) -> str | None:
        """Start a process if one is due. Return the output of one that has just ended, else None."""
        now = time.monotonic()
        if self._child is None:
            if now - self._began >= self._every:
                self._start(now)
            return None
        self._read()
        if self._child.poll() is not None:
            return self._end()
        if now - self._began > self._timeout:
            self._child.kill()
            self.problem = f"{self.name} takes longer than {self._timeout:g} s."
        return None

    def close(self) -> None:
        """Kill the process, without waiting for it."""
        if self._child is not None:
            self._child.kill()

    def _start(self, now: float) -> None:
        self._began, self._output = now, b""
        try:
            self._child = subprocess.Popen(
                list(self._command), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                env=self._environment,
            )  # fmt: skip
        except OSError as error:
            self.problem = f"{self.name}: {error.strerror}."
            return
        assert self._child.stdout is not None
        os.set_blocking(self._child.stdout.fileno(), False)

    def _read(self) -> None:
        assert self._child is not None
        assert self._child.stdout is not None
        with suppress(BlockingIOError):
            while chunk := os.read(self._child.stdout.fileno(), MAX_BYTES):
                self._output = (self._output + chunk)[:MAX_BYTES]

    def _end(self) -> str:
        assert self._child is not None
        assert self._child.stdout is not None
        self._read()
        code = self._child.returncode
        self._child.stdout.close()
        self._child = None
        if code == 0:
            self.problem = ""
        elif not self.problem:
            self.problem = f"{self.name} exited with {code}."
        return self._output.decode(errors="replace")
