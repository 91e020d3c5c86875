"""The inlet temperature is read over Redfish from real BMCs' documents, and nothing that a BMC sends does harm."""

from __future__ import annotations

import json
import socket
import time
from pathlib import Path
from typing import Any

import pytest

from nodes.agent.inlet import redfish
from nodes.agent.inlet.probe import InletProbe, InletSource, redfish_celsius
from nodes.agent.inlet.redfish_client import RedfishClient, RedfishError
from nodes.agent.settings import InvalidSetting, RedfishSettings, read_settings
from tests.nodes.agent.inlet.bmc import PASSWORD, V1, Bmc, chassis, metrics, running, sensors, temperature, thermal
from tests.waiting import until

CPU = temperature("CPU1 Temp", 41, "CPU")
DMTF = thermal(CPU, temperature("CPU2 Temp", None, "CPU", "Disabled"), temperature("Chassis Intake Temp", 25, "Intake"))
IDRAC = thermal(
    CPU,
    temperature("System Board Exhaust Temp", 38, "SystemBoard"),
    temperature("System Board Inlet Temp", 22, "SystemBoard"),
)
ILO = thermal(temperature("32-P/S 1 Inlet", 35, "Intake"), temperature("01-Inlet Ambient", 21, "Intake"))
DGX = thermal(temperature("TEMP_CPU0", 52), temperature("TEMP_AMBIENT", 24), temperature("TEMP_PSU0", 38), name="Self")
SUPERMICRO = thermal(
    temperature("System Temp", 33), temperature("Inlet Temp", 23), temperature("GPU1 Inlet", 48), name="1"
)
SUMMARY = metrics(
    TemperatureSummaryCelsius={
        "Intake": {"Reading": 24.8, "DataSourceUri": f"{V1}/Chassis/1U/Sensors/IntakeTemp"},
        "Ambient": {"Reading": 22.5, "DataSourceUri": f"{V1}/Chassis/1U/Sensors/AmbientTemp"},
        "Exhaust": {"Reading": 40.5},
    }
)  # fmt: skip
READINGS = metrics(
    TemperatureReadingsCelsius=[{"Reading": 40, "DeviceName": "Exhaust"}, {"Reading": 26, "DeviceName": "Intake"}]
)
SENSORS = sensors(
    FanInlet={"Name": "Fan", "Reading": 8000, "ReadingUnits": "RPM"},
    CPU1Temp={"Name": "CPU #1", "Reading": 60, "ReadingType": "Temperature", "PhysicalContext": "CPU"},
    HGX_Inlet_Temp_0={"Name": "Front air", "Reading": 27.5, "ReadingType": "Temperature", "PhysicalContext": "Intake"},
)  # fmt: skip


def client(bmc: Bmc, **options: Any) -> RedfishClient:
    return RedfishClient(bmc.url, bmc.credentials, bmc.certificate, **options)


def read(documents: dict[str, Any], folder: Path, sensor: str = "") -> redfish.SensorReading:
    with running(documents, folder) as bmc, client(bmc) as connection:
        return redfish.read_inlet(connection, sensor)


@pytest.mark.parametrize(
    ("documents", "celsius", "sensor"),
    [
        (DMTF, 25.0, "Chassis Intake Temp"),
        (IDRAC, 22.0, "System Board Inlet Temp"),
        (ILO, 21.0, "01-Inlet Ambient"),
        (DGX, 24.0, "TEMP_AMBIENT"),
        (SUPERMICRO, 23.0, "Inlet Temp"),
        (SUMMARY, 24.8, "Intake"),
        (READINGS, 26.0, "Intake"),
        (SENSORS, 27.5, "Front air"),
    ],
)
def test_finds_the_inlet_of(tmp_path: Path, documents: dict[str, Any], celsius: float, sensor: str) -> None:
    assert read(documents, tmp_path) == redfish.SensorReading(celsius, sensor)


def test_a_named_sensor_counts_and_no_other(tmp_path: Path) -> None:
    with running(IDRAC, tmp_path) as bmc:
        with client(bmc) as connection:
            assert redfish.read_inlet(connection, "CPU1 Temp").celsius == 41
        with client(bmc) as connection, pytest.raises(RedfishError, match="lists no Inlet Temp temperature"):
            redfish.read_inlet(connection, "Inlet Temp")


def test_a_link_to_nothing_is_passed_over(tmp_path: Path) -> None:
    documents = SENSORS | {f"{V1}/Chassis/1U": chassis("1U", "Thermal", "Sensors")[f"{V1}/Chassis/1U"]}
    assert read(documents, tmp_path).celsius == 27.5


def test_a_sensor_that_is_gone_does_not_lose_the_others(tmp_path: Path) -> None:
    gone = f"{V1}/Chassis/1U/Sensors/Inlet_gone"
    collection = f"{V1}/Chassis/1U/Sensors"
    members = [{"@odata.id": gone}, *SENSORS[collection]["Members"]]
    assert read(SENSORS | {collection: SENSORS[collection] | {"Members": members}}, tmp_path).celsius == 27.5


def with_many_chassis(documents: dict[str, Any], number: int = 30) -> dict[str, Any]:
    """Return the documents with further chassis, one for each GPU and switch, as an HGX board lists them."""
    found = dict(documents)
    members = list(documents[f"{V1}/Chassis"]["Members"])
    for place in range(number):
        name = f"HGX_GPU_SXM_{place}"
        found |= chassis(name, "Thermal", "ThermalSubsystem", "Sensors")
        found |= {f"{V1}/Chassis/{name}/{link}": {} for link in ("Thermal", "ThermalSubsystem", "Sensors")}
        members.append({"@odata.id": f"{V1}/Chassis/{name}"})
    return found | {f"{V1}/Chassis": {"Members": members}}


def test_a_reading_counts_when_the_budget_ends_after_it(tmp_path: Path) -> None:
    with running(with_many_chassis(DGX), tmp_path) as bmc, client(bmc) as connection:
        assert redfish.read_inlet(connection) == redfish.SensorReading(24.0, "TEMP_AMBIENT")
    assert len(bmc.requested) == 60


def test_without_a_reading_the_end_of_the_budget_names_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(RedfishError, match="More than 60 resources .* VIGIL_AGENT_INLET=redfish:SENSOR"):
        read(with_many_chassis(thermal(CPU)), tmp_path)


def _busy(handler: Any) -> None:
    handler.reply(503, b"")


def _hang(handler: Any) -> None:
    handler.send_response(200)
    handler.send_header("Content-Length", "100")
    handler.end_headers()
    handler.wfile.write(b"{")
    handler.wfile.flush()
    time.sleep(1.5)


def _redirect(handler: Any) -> None:
    handler.reply(302, b"", Location="https://elsewhere.example/redfish/v1/Chassis")


HOT = f"{V1}/Chassis/1U/Thermal"


@pytest.mark.parametrize(
    ("documents", "problem"),
    [
        ({f"{V1}/Chassis": b"<html>Login</html>"}, "is not JSON"),
        ({f"{V1}/Chassis": b"[" * 200_000}, "is not JSON"),
        ({f"{V1}/Chassis": b"[1, 2]"}, "is not a JSON object"),
        ({f"{V1}/Chassis": b" " * (1024 * 1024 + 1)}, "is larger than 1024 KiB"),
        ({f"{V1}/Chassis": _redirect}, "answers with 302"),
        (chassis("1U", "Thermal") | {HOT: _busy}, "1U/Thermal answers with 503"),
        ({}, "answers with 404"),
        ({f"{V1}/Chassis": {"Members": "none"}}, "lists no inlet temperature"),
        ({f"{V1}/Chassis": {"Members": [{"@odata.id": "http://169.254.169.254/latest"}]}}, "no Redfish resource"),
        ({f"{V1}/Chassis": {"Members": [{"@odata.id": "/redfish/a b\r\nX: y"}]}}, "no Redfish resource"),
        (chassis("1U", "Thermal") | {HOT: {"Temperatures": {"Name": "Inlet"}}}, "lists no inlet temperature"),
        (thermal(temperature("Inlet Temp", 900)), "Inlet Temp reads 900 °C, which is no inlet temperature"),
        (thermal(temperature("Inlet Temp", float("nan"))), "reads nan °C"),
        (thermal(temperature("Inlet Temp", 10**400)), "no inlet temperature"),
        (thermal({"PhysicalContext": "Intake", "ReadingCelsius": "warm"}), "The inlet sensor has no reading"),
        (thermal(temperature("Inlet Temp", "warm")), "Inlet Temp has no reading"),
        (thermal(temperature("Inlet Temp", True)), "Inlet Temp has no reading"),
        (thermal(temperature("Inlet Temp", None)), "lists no inlet temperature"),
        (thermal(CPU, temperature("PS1 Inlet Temp", 30, "Intake")), "lists no inlet temperature"),
    ],
)  # fmt: skip
def test_what_is_no_inlet_temperature_is_refused_with_the_reason(
    tmp_path: Path, documents: dict[str, Any], problem: str
) -> None:
    with pytest.raises(RedfishError, match=problem):
        read(documents, tmp_path)


def test_a_bmc_that_links_in_circles_is_given_up(tmp_path: Path) -> None:
    members = [{"@odata.id": f"{V1}/Chassis/{n}"} for n in range(100)]
    documents: dict[str, Any] = {f"{V1}/Chassis": {"Members": members}}
    for row in members:
        links = {name: {"@odata.id": f"{V1}/Chassis"} for name in ("Thermal", "ThermalSubsystem", "Sensors")}
        documents[row["@odata.id"]] = links | {"ThermalMetrics": {"@odata.id": f"{V1}/Chassis"}}
    with running(documents, tmp_path) as bmc, client(bmc) as connection, pytest.raises(RedfishError):
        redfish.read_inlet(connection)
    assert len(bmc.requested) <= 60


def test_a_bmc_that_hangs_is_given_up(tmp_path: Path) -> None:
    late = pytest.raises(RedfishError, match="does not answer in time|reached")
    with running({f"{V1}/Chassis": _hang}, tmp_path) as bmc, client(bmc, deadline=0.5) as connection, late:
        redfish.read_inlet(connection)


def test_wrong_credentials_are_named_but_not_shown(tmp_path: Path) -> None:
    with running(DMTF, tmp_path) as bmc:
        bmc.credentials.write_text("monitor:wrong-password\n")
        with client(bmc) as connection, pytest.raises(RedfishError, match=r"refuses the credentials \(401\)") as error:
            redfish.read_inlet(connection)
    assert "wrong-password" not in str(error.value)


@pytest.mark.parametrize(
    ("mode", "text", "problem"),
    [(0o644, "a:b", "Others can read"), (0o600, "no colon", "must have one line"), (0o600, "a:b\nc:d", "one line")],
)
def test_credentials_that_others_can_read_or_that_are_none_are_refused(
    tmp_path: Path, mode: int, text: str, problem: str
) -> None:
    file = tmp_path / "credentials"
    file.write_text(text)
    file.chmod(mode)
    with pytest.raises(RedfishError, match=problem):
        RedfishClient("https://127.0.0.1:1", file, None)


def test_a_damaged_certificate_file_is_named(tmp_path: Path) -> None:
    file, damaged = tmp_path / "credentials", tmp_path / "bmc-ca.pem"
    file.touch(mode=0o600)
    file.write_text("a:b")
    damaged.write_text("-----BEGIN CERTIFICATE-----\nMIIB\u00e9====x\n-----END CERTIFICATE-----\n")
    with pytest.raises(RedfishError, match=r"bmc-ca\.pem has a certificate that is damaged"):
        RedfishClient("https://127.0.0.1:1", file, damaged)


def test_a_certificate_is_verified(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    with running(DMTF, tmp_path) as bmc, running(DMTF, other) as stranger:
        for authority, problem in (
            (None, "certificate is not trusted.*VIGIL_AGENT_REDFISH_CA_FILE"),
            (stranger.certificate, "neither signed for this host"),
        ):
            connection = RedfishClient(bmc.url, bmc.credentials, authority)
            with connection, pytest.raises(RedfishError, match=problem):
                redfish.read_inlet(connection)
    assert not bmc.requested, "nothing was sent to a BMC that is not trusted"


def test_the_certificate_of_the_bmc_need_not_name_the_host(tmp_path: Path) -> None:
    def closes(handler: Any) -> None:
        body = json.dumps(DMTF[f"{V1}/Chassis"]).encode()
        handler.reply(200, body, Connection="close")

    documents = DMTF | {f"{V1}/Chassis": closes}
    with running(documents, tmp_path, subject="DNS:bmc.invalid") as bmc, client(bmc) as connection:
        assert redfish.read_inlet(connection).celsius == 25


def test_the_agent_reads_it_in_a_separate_process(tmp_path: Path) -> None:
    with running(DMTF, tmp_path) as bmc:
        settings = RedfishSettings(bmc.url, bmc.credentials, bmc.certificate)
        source = InletSource.redfish(settings, "")
        assert PASSWORD not in " ".join(source.command)
        probe = InletProbe(source, every=60)
        until(lambda: probe.poll() or probe.values() or probe.problem)
        assert (probe.values(), probe.problem) == ({"inlet_c": 25.0}, "")


def test_a_bmc_that_is_away_is_a_problem_not_an_error(tmp_path: Path) -> None:
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        port = reserved.getsockname()[1]
        file = tmp_path / "credentials"
        file.touch(mode=0o600)
        file.write_text("a:b")
        source = InletSource.redfish(RedfishSettings(f"https://127.0.0.1:{port}", file), "")
        probe = InletProbe(source, every=60)
        until(lambda: probe.poll() or probe.problem)
    assert "cannot be reached: Connection refused" in probe.problem
    assert probe.values() == {}


@pytest.mark.parametrize("output", ["", "Traceback", "[1]", '{"celsius": true}', '{"celsius": "24"}', "9" * 70_000])
def test_what_is_not_the_programs_output_is_a_problem(output: str) -> None:
    assert redfish_celsius(output) == "The BMC's Redfish service could not be read."


SETTINGS = {
    "VIGIL_AGENT_INLET": "redfish:Inlet Temp", "VIGIL_AGENT_REDFISH_URL": "https://bmc.example.org/",
    "VIGIL_AGENT_REDFISH_CREDENTIALS_FILE": "/etc/vigil-agent/bmc",
}  # fmt: skip


def test_settings_of_redfish() -> None:
    found = read_settings(SETTINGS, posts=False)
    assert (found.inlet, found.redfish) == (
        "Inlet Temp", RedfishSettings("https://bmc.example.org", Path("/etc/vigil-agent/bmc")),
    )  # fmt: skip
    authority = read_settings({**SETTINGS, "VIGIL_AGENT_REDFISH_CA_FILE": "/etc/bmc.pem"}, posts=False).redfish
    assert authority is not None
    assert authority.ca_file == Path("/etc/bmc.pem")
    assert read_settings({**SETTINGS, "VIGIL_AGENT_INLET": "ipmitool"}, posts=False).redfish is None


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(
            ("URL", value)
            for value in ("", "http://bmc", "https://", "https://a:b@bmc", "https://bmc/x", "https://bmc:x")
        ),
        *(("CREDENTIALS_FILE", value) for value in ("", "relative")),
        ("CA_FILE", "relative"),
    ],
)
def test_settings_that_are_refused(name: str, value: str) -> None:
    with pytest.raises(InvalidSetting, match=f"VIGIL_AGENT_REDFISH_{name}") as error:
        read_settings({**SETTINGS, f"VIGIL_AGENT_REDFISH_{name}": value}, posts=False)
    assert "a:b" not in str(error.value)


def test_the_program_prints_a_single_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with running(DMTF, tmp_path) as bmc:
        redfish.main([bmc.url, str(bmc.credentials), str(bmc.certificate), ""])
    assert json.loads(capsys.readouterr().out) == {"celsius": 25.0, "sensor": "Chassis Intake Temp"}
    redfish.main(["https://127.0.0.1:1", "/nowhere", "", ""])
    assert "No such file" in json.loads(capsys.readouterr().out)["problem"]
