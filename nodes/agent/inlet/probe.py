"""Read the temperature of the air that the node takes in from its BMC, once a minute: with `ipmitool`, or by Redfish.

The BMC answers in seconds, or not at all; a program that the agent never waits for asks it.
"""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

from gpus.reader import environment
from nodes.agent.inlet.sensors import is_of_other_part, sounds_like_inlet
from nodes.agent.polled_command import PolledCommand
from nodes.agent.settings import AgentSettings, RedfishSettings

COMMAND = ("ipmitool", "sdr", "type", "Temperature")
TIMEOUT_S = 20.0
STALE_S = 300.0
"""An older value is not reported any more."""
MAX_PROBLEM = 300
_READING = re.compile(r"(-?\d{1,3}(?:\.\d+)?)\s*degrees C", re.IGNORECASE)


@dataclass(frozen=True)
class InletSource:
    """A program that prints the temperature, and how to read its output: as a value, or as why there is none."""

    command: Sequence[str]
    name: str
    parse: Callable[[str], float | str]
    environment: Mapping[str, str] | None = None

    @classmethod
    def ipmitool(cls, sensor: str, command: Sequence[str] = COMMAND) -> Self:
        missing = f"{command[0]} lists no {sensor or 'inlet'} temperature."

        def parse(output: str) -> float | str:
            found = inlet_celsius(output, sensor)
            return missing if found is None else found

        return cls(command, command[0], parse)

    @classmethod
    def redfish(cls, settings: RedfishSettings, sensor: str) -> Self:
        files = (str(settings.credentials_file), str(settings.ca_file or ""))
        program = (sys.executable, "-P", "-m", "nodes.agent.inlet.redfish")
        command = (*program, settings.url, *files, sensor)
        return cls(command, "The BMC's Redfish service", redfish_celsius, environment())


class InletProbe:
    """Reads the inlet temperature. `poll` never waits."""

    def __init__(self, source: InletSource, *, every: float = 60.0, timeout: float = TIMEOUT_S) -> None:
        self.problem = ""
        """Why the last try failed; "" if it did not."""
        self._source = source
        self._command = PolledCommand(
            source.command, every=every, timeout=timeout, name=source.name, environment=source.environment
        )
        self._celsius: float | None = None
        self._read_at = 0.0

    @classmethod
    def from_settings(cls, settings: AgentSettings, *, every: float) -> Self | None:
        """Return the probe that the settings want; None if the BMC is not read."""
        if settings.inlet is None:
            return None
        if settings.redfish is not None:
            return cls(InletSource.redfish(settings.redfish, settings.inlet), every=every)
        return cls(InletSource.ipmitool(settings.inlet), every=every)

    def poll(self) -> None:
        """Start a process if one is due, and read its output."""
        output = self._command.poll()
        if output is None:
            self.problem = self._command.problem or self.problem
            return
        found = self._source.parse(output)
        if isinstance(found, float):
            self._celsius, self._read_at = found, time.monotonic()
            self.problem = self._command.problem = ""
        else:
            self.problem = self._command.problem or found

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
        is_it = name == sensor if sensor else sounds_like_inlet(name) and not is_of_other_part(name)
        if is_it and (found := _READING.search(line.replace(",", " "))):
            return float(found[1])
    return None


def redfish_celsius(output: str) -> float | str:
    """Return the temperature that `nodes.agent.inlet.redfish` printed, or why it could not read it."""
    try:
        found = json.loads(output)
    except (ValueError, RecursionError):
        found = None
    answer = found if isinstance(found, dict) else {}
    if isinstance(answer.get("celsius"), float):
        return float(answer["celsius"])
    if isinstance(answer.get("problem"), str):
        return f"The BMC by Redfish: {answer['problem']}"[:MAX_PROBLEM]
    return "The BMC's Redfish service could not be read."
