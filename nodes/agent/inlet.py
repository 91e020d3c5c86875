"""Read the temperature of the air that the node takes in from its BMC, with `ipmitool`, once a minute.

The BMC answers in seconds, or not at all, and a driver may block the program for good: it runs as a process that is
never waited for. One that takes longer than TIMEOUT_S is killed; while one hangs, no other is started.
"""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress

COMMAND = ("ipmitool", "sdr", "type", "Temperature")
TIMEOUT_S = 20.0
STALE_S = 300.0
"""An older value is not reported any more."""
MOST_BYTES = 65_536
_LOOKS_LIKE_IT = re.compile(r"inlet|ambient|intake|front panel", re.IGNORECASE)
_READING = re.compile(r"(-?\d{1,3}(?:\.\d+)?)\s*degrees C", re.IGNORECASE)


class InletProbe:
    """Reads the inlet temperature. `sensor`: its name; "": the first that looks like an inlet. `poll` never waits."""

    def __init__(
        self, sensor: str, *, every: float = 60.0, command: Sequence[str] = COMMAND, timeout: float = TIMEOUT_S
    ) -> None:
        self.problem = ""
        """Why the last try failed; "" if it did not."""
        self._sensor, self._every, self._command, self._timeout = sensor, every, command, timeout
        self._child: subprocess.Popen[bytes] | None = None
        self._output = b""
        self._began = -every
        self._celsius: float | None = None
        self._read_at = 0.0

    def poll(self) -> None:
        """Start a process if one is due, and collect its output."""
        now = time.monotonic()
        if self._child is None:
            if now - self._began >= self._every:
                self._start(now)
            return
        self._read()
        if self._child.poll() is not None:
            self._end(now)
        elif now - self._began > self._timeout:
            self._child.kill()
            self.problem = f"{self._command[0]} takes longer than {self._timeout:g} s."

    def values(self) -> dict[str, float | None]:
        """Return the host value `inlet_c`; nothing while it is not known."""
        if self._celsius is None or time.monotonic() - self._read_at > STALE_S:
            return {}
        return {"inlet_c": self._celsius}

    def close(self) -> None:
        """Kill the process, without waiting for it."""
        if self._child is not None:
            self._child.kill()

    def _start(self, now: float) -> None:
        self._began, self._output = now, b""
        try:
            self._child = subprocess.Popen(
                list(self._command), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
            )
        except OSError as error:
            self.problem = f"{self._command[0]}: {error.strerror}."
            return
        assert self._child.stdout is not None
        os.set_blocking(self._child.stdout.fileno(), False)

    def _read(self) -> None:
        assert self._child is not None
        assert self._child.stdout is not None
        with suppress(BlockingIOError):
            while chunk := os.read(self._child.stdout.fileno(), MOST_BYTES):
                self._output = (self._output + chunk)[:MOST_BYTES]

    def _end(self, now: float) -> None:
        assert self._child is not None
        assert self._child.stdout is not None
        self._read()
        code = self._child.returncode
        self._child.stdout.close()
        self._child = None
        found = inlet_celsius(self._output.decode(errors="replace"), self._sensor)
        if found is not None:
            self._celsius, self._read_at, self.problem = found, now, ""
        elif code == 0 or not self.problem:
            self.problem = (
                f"{self._command[0]} lists no {self._sensor or 'inlet'} temperature." if code == 0
                else f"{self._command[0]} exited with {code}."
            )  # fmt: skip


def inlet_celsius(text: str, sensor: str = "") -> float | None:
    """Return the reading of the sensor in °C from lines such as "Inlet Temp | 04h | ok | 7.1 | 23 degrees C"."""
    for line in text.splitlines():
        name = re.split(r"[|,]", line, maxsplit=1)[0].strip()
        is_it = name == sensor if sensor else _LOOKS_LIKE_IT.search(name) is not None
        if is_it and (found := _READING.search(line.replace(",", " "))):
            return float(found[1])
    return None
