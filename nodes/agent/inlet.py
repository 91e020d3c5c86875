"""Read the temperature of the air that the node takes in from its BMC, with `ipmitool`, once a minute.

The BMC answers in seconds, or not at all.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence

from nodes.agent.polled_command import PolledCommand

COMMAND = ("ipmitool", "sdr", "type", "Temperature")
TIMEOUT_S = 20.0
STALE_S = 300.0
"""An older value is not reported any more."""
_LOOKS_LIKE_IT = re.compile(r"inlet|ambient|intake|front panel", re.IGNORECASE)
_READING = re.compile(r"(-?\d{1,3}(?:\.\d+)?)\s*degrees C", re.IGNORECASE)


class InletProbe:
    """Reads the inlet temperature. `sensor`: its name; "": the first that looks like an inlet. `poll` never waits."""

    def __init__(
        self, sensor: str, *, every: float = 60.0, command: Sequence[str] = COMMAND, timeout: float = TIMEOUT_S
    ) -> None:
        self.problem = ""
        """Why the last try failed; "" if it did not."""
        self._sensor = sensor
        self._command = PolledCommand(command, every=every, timeout=timeout)
        self._celsius: float | None = None
        self._read_at = 0.0

    def poll(self) -> None:
        """Start a process if one is due, and read its output."""
        output = self._command.poll()
        if output is None:
            self.problem = self._command.problem or self.problem
            return
        found = inlet_celsius(output, self._sensor)
        if found is not None:
            self._celsius, self._read_at = found, time.monotonic()
            self.problem = self._command.problem = ""
        else:
            self.problem = self._command.problem or (
                f"{self._command.name} lists no {self._sensor or 'inlet'} temperature."
            )

    def values(self) -> dict[str, float | None]:
        """Return the host value `inlet_c`; nothing while it is not known."""
        if self._celsius is None or time.monotonic() - self._read_at > STALE_S:
            return {}
        return {"inlet_c": self._celsius}

    def close(self) -> None:
        """Kill the process, without waiting for it."""
        self._command.close()


def inlet_celsius(text: str, sensor: str = "") -> float | None:
    """Return the reading of the sensor in °C from lines such as "Inlet Temp | 04h | ok | 7.1 | 23 degrees C"."""
    for line in text.splitlines():
        name = re.split(r"[|,]", line, maxsplit=1)[0].strip()
        is_it = name == sensor if sensor else _LOOKS_LIKE_IT.search(name) is not None
        if is_it and (found := _READING.search(line.replace(",", " "))):
            return float(found[1])
    return None
