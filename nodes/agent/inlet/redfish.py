"""Find and read the inlet temperature over Redfish: a program that the agent runs once a minute, and may kill.

    python -m nodes.agent.inlet.redfish URL CREDENTIALS_FILE CA_FILE SENSOR

It prints one line of JSON: {"celsius": 24.8, "sensor": "Inlet Temp"}, or {"problem": "…"}. CA_FILE and SENSOR may be
empty. Of each chassis it reads Thermal, which Dell, HPE, Supermicro and the DGX H100 and A100 have, then its successors
ThermalSubsystem and Sensors. A sensor of the air inlet has the physical context Intake (Redfish) or a name like "Inlet
Temp" (Dell, Supermicro), "01-Inlet Ambient" (HPE), "TEMP_AMBIENT" (DGX); those of power supplies are something else.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nodes.agent.inlet.redfish_client import ROOT, RedfishClient, RedfishError, ResourceMissing, TooManyResources
from nodes.agent.inlet.sensors import is_of_other_part, sounds_like_inlet

MAX_CHASSIS, MAX_MEMBERS, MAX_SENSORS = 16, 2_000, 8
COLDEST_C, WARMEST_C = -10.0, 80.0
"""Anything else is no air that a machine takes in; the portal believes the same."""
_CONTEXTS = ("Intake", "Room")
_ABSENT = frozenset({"Absent", "Disabled", "UnavailableOffline"})
_UNITS = ("Cel", "°C", "C")


@dataclass(frozen=True)
class SensorReading:
    """A temperature with the sensor's name."""

    celsius: float
    sensor: str


@dataclass(frozen=True)
class _ReportedTemperature:
    """A temperature that may be the inlet's. `names`: all names of its sensor, one of which a setting may choose."""

    names: tuple[str, ...]
    context: str
    value: object

    def rank(self, sensor: str) -> int:
        """Return how surely it is the inlet: 0 is not at all; with the sensor's name given only that one counts."""
        if sensor:
            return 9 if sensor in self.names else 0
        if any(is_of_other_part(name) for name in self.names):
            return 0
        if self.context in _CONTEXTS:
            return 3 - _CONTEXTS.index(self.context)
        return 1 if any(sounds_like_inlet(name) for name in self.names) else 0


def read_inlet(client: RedfishClient, sensor: str = "") -> SensorReading:
    """Return the inlet temperature of the BMC's machine. Raises RedfishError."""
    best, best_rank = None, 0
    try:
        for candidate in _temperatures(client, sensor):
            if candidate.value is not None and candidate.rank(sensor) > best_rank:
                best, best_rank = candidate, candidate.rank(sensor)
            if best_rank >= 3:  # nothing says it better
                break
    except TooManyResources as error:
        if best is None and not sensor:
            raise RedfishError(f"{error} Name it: VIGIL_AGENT_INLET=redfish:SENSOR.") from None
        if best is None:
            raise
    except RedfishError:  # out of time, or one resource is broken: what was found counts all the same
        if best is None:
            raise
    if best is None:
        raise RedfishError(client.first_failure or f"It lists no {sensor or 'inlet'} temperature.")
    return _reading(best)


def _temperatures(client: RedfishClient, sensor: str) -> Iterator[_ReportedTemperature]:
    """Yield the temperatures of all chassis."""
    for chassis in _members(client, f"{ROOT}Chassis", MAX_CHASSIS):
        for read in (_thermal, _thermal_metrics, _sensors):
            yield from read(client, chassis, sensor)


def _reading(candidate: _ReportedTemperature) -> SensorReading:
    name, value = candidate.names[0] if candidate.names else "The inlet sensor", candidate.value
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise RedfishError(f"{_shown(name)} has no reading.")
    if not COLDEST_C <= value <= WARMEST_C:
        raise RedfishError(f"{_shown(name)} reads {str(value)[:12]} °C, which is no inlet temperature.")
    return SensorReading(float(value), _shown(name))


def _thermal(client: RedfishClient, chassis: dict[str, Any], sensor: str) -> Iterator[_ReportedTemperature]:
    """Yield the temperatures of the Thermal resource."""
    thermal = _linked(client, chassis, "Thermal")
    for row in _tables(thermal.get("Temperatures")):
        if _is_there(row):
            names = _texts(row, "Name", "MemberId", "Id")
            yield _ReportedTemperature(names, str(row.get("PhysicalContext", "")), row.get("ReadingCelsius"))


def _thermal_metrics(client: RedfishClient, chassis: dict[str, Any], sensor: str) -> Iterator[_ReportedTemperature]:
    """Yield the summary's intake and room temperatures, then all temperatures of the ThermalMetrics resource."""
    subsystem = _linked(client, chassis, "ThermalSubsystem")
    metrics = _linked(client, subsystem, "ThermalMetrics")
    summary = metrics.get("TemperatureSummaryCelsius")
    for name, context in (("Intake", "Intake"), ("Ambient", "Room")):
        row = summary.get(name) if isinstance(summary, dict) else None
        if isinstance(row, dict):
            yield _ReportedTemperature((name, *_last_part(row.get("DataSourceUri"))), context, row.get("Reading"))
    for row in _tables(metrics.get("TemperatureReadingsCelsius")):
        names = (*_texts(row, "DeviceName"), *_last_part(row.get("DataSourceUri")))
        if names:
            yield _ReportedTemperature(names, str(row.get("PhysicalContext", "")), row.get("Reading"))


def _sensors(client: RedfishClient, chassis: dict[str, Any], sensor: str) -> Iterator[_ReportedTemperature]:
    """Yield the temperatures among the sensors whose addresses look like it: there may be hundreds."""
    collection = _linked(client, chassis, "Sensors")
    paths = [path for row in _tables(collection.get("Members")) if (path := _path(row))]
    wanted = [path for path in paths if (_is_named(path, sensor) if sensor else sounds_like_inlet(path))]
    for path in wanted[:MAX_SENSORS]:
        row = _get(client, path)
        is_temperature = row.get("ReadingType") == "Temperature" or row.get("ReadingUnits") in _UNITS
        if is_temperature and _is_there(row):
            names = (*_texts(row, "Name", "Id"), *_last_part(path))
            yield _ReportedTemperature(names, str(row.get("PhysicalContext", "")), row.get("Reading"))


def _members(client: RedfishClient, path: str, most: int) -> Iterator[dict[str, Any]]:
    members = client.get(path).get("Members")
    for row in _tables(members)[:most]:
        if (member := _path(row)) and (found := _get(client, member)):
            yield found


def _linked(client: RedfishClient, resource: dict[str, Any], name: str) -> dict[str, Any]:
    """Return the resource behind a link; {} without one."""
    link = resource.get(name)
    path = _path(link) if isinstance(link, dict) else ""
    return _get(client, path) if path else {}


def _get(client: RedfishClient, path: str) -> dict[str, Any]:
    """Return the resource; {} if the BMC links to it and does not have it."""
    try:
        return client.get(path)
    except ResourceMissing:
        return {}


def _path(row: dict[str, Any]) -> str:
    path = row.get("@odata.id")
    return path.partition("#")[0] if isinstance(path, str) else ""


def _tables(value: object) -> list[dict[str, Any]]:
    return [row for row in value[:MAX_MEMBERS] if isinstance(row, dict)] if isinstance(value, list) else []


def _texts(row: dict[str, Any], *names: str) -> tuple[str, ...]:
    return tuple(value for name in names if isinstance(value := row.get(name), str) and value)


def _last_part(path: object) -> tuple[str, ...]:
    return (path.rstrip("/").rpartition("/")[2],) if isinstance(path, str) and path else ()


def _is_named(path: str, sensor: str) -> bool:
    """Return whether a sensor's address may belong to this name: "Inlet Temp" is often …/Sensors/Inlet_Temp."""
    return sensor in _last_part(path) or re.sub(r"\W|_", "", sensor).lower() in re.sub(r"\W|_", "", path).lower()


def _is_there(row: dict[str, Any]) -> bool:
    status = row.get("Status")
    return not isinstance(status, dict) or status.get("State") not in _ABSENT


def _shown(name: str) -> str:
    return "".join(letter if letter.isprintable() else "?" for letter in name)[:64]


def main(arguments: Sequence[str]) -> int:
    """Print the inlet temperature, or why it cannot be read."""
    url, credentials, authority, sensor = arguments
    try:
        with RedfishClient(url, Path(credentials), Path(authority) if authority else None) as client:
            reading = read_inlet(client, sensor)
        print(json.dumps({"celsius": reading.celsius, "sensor": reading.sensor}))
    except RedfishError as error:
        print(json.dumps({"problem": str(error)}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
