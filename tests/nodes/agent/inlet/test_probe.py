"""The BMC's temperature is read by a program that may be missing, fail or hang; the agent never waits for it."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from nodes.agent.inlet.probe import InletProbe, InletSource, inlet_celsius
from nodes.agent.settings import InvalidSetting, read_settings
from tests.nodes.agent.running import Running
from tests.waiting import until

DGX = """\
TEMP_CPU0        | 30h | ok  |  3.1 | 41 degrees C
TEMP_AMBIENT     | 31h | ok  |  7.1 | 24 degrees C
TEMP_MB_INLET    | 32h | ns  |  7.2 | No Reading
"""


@pytest.mark.parametrize(
    ("text", "sensor", "celsius"),
    [
        (DGX, "", 24.0),
        (DGX, "TEMP_CPU0", 41.0),
        (DGX, "TEMP_MB_INLET", None),
        (DGX, "nowhere", None),
        ("Inlet Temp,23.5,degrees C,ok,7.1\n", "", 23.5),
        ("Inlet Temp       | 04h | ok  |  7.1 | -2 degrees C\n", "", -2.0),
        ("PSU1 Inlet | 2h | ok | 10.1 | 35 degrees C\nP/S 2 Inlet | 3h | ok | 10.2 | 36 degrees C\n", "", None),
        ("PSU1 Inlet | 2h | ok | 10.1 | 35 degrees C\nInlet Temp | 4h | ok | 7.1 | 23 degrees C\n", "", 23.0),
        ("PSU1 Inlet | 2h | ok | 10.1 | 35 degrees C\n", "PSU1 Inlet", 35.0),
        ("garbage\n\x00|||,,,\n", "", None),
        ("", "", None),
    ],
)
def test_readings(text: str, sensor: str, celsius: float | None) -> None:
    assert inlet_celsius(text, sensor) == celsius


def program(folder: Path, body: str) -> Path:
    path = folder / "ipmitool"
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return path


def test_it_is_read_again_and_again(tmp_path: Path) -> None:
    count = tmp_path / "count"
    path = program(tmp_path, f"echo x >> {count}; echo 'Inlet Temp | 04h | ok | 7.1 | '$(wc -l < {count})' degrees C'")
    probe = InletProbe(InletSource.ipmitool("", [str(path)]), every=0.01)
    until(lambda: probe.poll() or probe.values().get("inlet_c") == 3.0)
    assert probe.problem == ""


@pytest.mark.parametrize(
    ("body", "problem"),
    [("exit 3", "exited with 3"), ("echo nothing", "lists no inlet temperature"), ("exec sleep 600", "takes longer")],
)
def test_a_program_that_fails_or_hangs_gives_no_value_but_a_reason(tmp_path: Path, body: str, problem: str) -> None:
    probe = InletProbe(InletSource.ipmitool("", [str(program(tmp_path, body))]), every=60, timeout=0.2)
    until(lambda: probe.poll() or problem in probe.problem)
    assert probe.values() == {}
    end(probe)


def end(probe: InletProbe) -> None:
    probe.close()
    until(lambda: probe.poll() or probe._command._child is None)


def test_polling_a_hanging_program_never_waits(tmp_path: Path) -> None:
    path = program(tmp_path, "trap '' TERM; exec sleep 600")
    probe = InletProbe(InletSource.ipmitool("", [str(path)]), every=60, timeout=60)
    began = time.monotonic()
    for _ in range(50):
        probe.poll()
    assert time.monotonic() - began < 5
    end(probe)


def test_a_missing_program_is_a_problem_not_an_error() -> None:
    probe = InletProbe(InletSource.ipmitool("", ["/nowhere/ipmitool"]))
    probe.poll()
    assert "No such file" in probe.problem
    assert probe.values() == {}


@pytest.mark.parametrize(
    ("text", "sensor"), [("", None), ("ipmitool", ""), ("ipmitool:Inlet Temp", "Inlet Temp"), (" ipmitool ", "")]
)
def test_it_is_off_unless_set(text: str, sensor: str | None) -> None:
    assert read_settings({"VIGIL_AGENT_INLET": text}, posts=False).inlet == sensor


@pytest.mark.parametrize("text", ["snmp", "ipmitool:a\nb", "redfish:a\nb", "/bin/sh", f"ipmitool:{'x' * 65}"])
def test_other_settings_are_refused(text: str) -> None:
    with pytest.raises(InvalidSetting, match="VIGIL_AGENT_INLET is"):
        read_settings({"VIGIL_AGENT_INLET": text}, posts=False)


def test_the_agent_reports_it_with_the_host(agent: Running, tmp_path: Path) -> None:
    program(tmp_path, "echo 'Inlet Temp | 04h | ok | 7.1 | 22 degrees C'")
    agent.start(VIGIL_AGENT_INLET="ipmitool", PATH=f"{tmp_path}:/usr/bin:/bin", LD_LIBRARY_PATH="")
    until(lambda: [batch for batch in agent.portal.batches() if batch["host"].get("inlet_c") == 22.0])
