"""A BMC with a Redfish service: a small HTTPS server. Its documents have the structure of DMTF's public mockups."""

from __future__ import annotations

import base64
import json
import ssl
import subprocess
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

USER, PASSWORD = "monitor", "s3cret-of-the-bmc"
V1 = "/redfish/v1"


def chassis(name: str = "1U", *links: str) -> dict[str, Any]:
    """A service with one chassis that has these links."""
    address = f"{V1}/Chassis/{name}"
    return {
        f"{V1}/Chassis": {
            "@odata.type": "#ChassisCollection.ChassisCollection", "Members": [{"@odata.id": address}],
            "Members@odata.count": 1,
        },
        address: {
            "@odata.type": "#Chassis.v1_15_0.Chassis", "Id": name, "ChassisType": "RackMount",
            **{link: {"@odata.id": f"{address}/{link}"} for link in links},
        },
    }  # fmt: skip


def temperature(name: str, celsius: object, context: str | None = None, state: str = "Enabled") -> dict[str, Any]:
    """A member of Thermal.Temperatures."""
    more = {} if context is None else {"PhysicalContext": context}
    status = {"State": state, "Health": "OK"}
    return {"MemberId": "0", "Name": name, "ReadingCelsius": celsius, "Status": status, **more}


def thermal(*temperatures: dict[str, Any], name: str = "1U") -> dict[str, Any]:
    return chassis(name, "Thermal") | {
        f"{V1}/Chassis/{name}/Thermal": {
            "@odata.type": "#Thermal.v1_7_0.Thermal", "Id": "Thermal", "Temperatures": list(temperatures), "Fans": [],
        }
    }  # fmt: skip


def metrics(**content: Any) -> dict[str, Any]:
    """A chassis with a ThermalSubsystem, and what its ThermalMetrics contain."""
    address = f"{V1}/Chassis/1U/ThermalSubsystem"
    return chassis("1U", "ThermalSubsystem") | {
        address: {
            "@odata.type": "#ThermalSubsystem.v1_0_0.ThermalSubsystem",
            "ThermalMetrics": {"@odata.id": f"{address}/ThermalMetrics"},
        },
        f"{address}/ThermalMetrics": {"@odata.type": "#ThermalMetrics.v1_0_0.ThermalMetrics", **content},
    }  # fmt: skip


def sensors(**readings: dict[str, Any]) -> dict[str, Any]:
    """A chassis with a collection of sensors, by the last part of their addresses."""
    address = f"{V1}/Chassis/1U/Sensors"
    kind = "#Sensor.v1_2_0.Sensor"
    members = {f"{address}/{name}": {"@odata.type": kind, "Id": name, **row} for name, row in readings.items()}
    return chassis("1U", "Sensors") | members | {address: {"Members": [{"@odata.id": path} for path in members]}}


@dataclass
class Bmc:
    """A running BMC; a document may be a function that answers by itself."""

    documents: Mapping[str, Any]
    folder: Path
    url: str = ""
    requested: list[str] = field(default_factory=list)
    stopping: threading.Event = field(default_factory=threading.Event)

    @property
    def certificate(self) -> Path:
        return self.folder / "bmc.pem"

    @property
    def credentials(self) -> Path:
        return self.folder / "credentials"


@contextmanager
def running(documents: Mapping[str, Any], folder: Path, *, subject: str = "IP:127.0.0.1") -> Iterator[Bmc]:
    """Run a BMC with a self-signed certificate for `subject`, and a file of its credentials."""
    bmc = Bmc(documents, folder)
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2",
         "-keyout", str(folder / "bmc.key"), "-out", str(bmc.certificate), "-subj", "/CN=BMC",
         "-addext", f"subjectAltName={subject}"],
        check=True, capture_output=True,
    )  # fmt: skip
    bmc.credentials.touch(mode=0o600)
    bmc.credentials.write_text(f"{USER}:{PASSWORD}\n")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(bmc.certificate, folder / "bmc.key")
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(bmc))
    server.daemon_threads = True
    server.socket = context.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    bmc.url = f"https://127.0.0.1:{server.server_address[1]}"
    try:
        yield bmc
    finally:
        bmc.stopping.set()
        server.shutdown()
        server.server_close()


def _handler(bmc: Bmc) -> type[BaseHTTPRequestHandler]:
    expected = "Basic " + base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()

    class Answer(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            bmc.requested.append(self.path)
            document = bmc.documents.get(self.path)
            if self.headers.get("Authorization") != expected:
                self.reply(401, b"{}")
            elif callable(document):
                document(self)
            elif document is None:
                self.reply(404, b"{}")
            else:
                self.reply(200, document if isinstance(document, bytes) else json.dumps(document).encode())

        def reply(self, status: int, body: bytes, **headers: str) -> None:
            self.send_response(status)
            for name, value in {"Content-Length": str(len(body)), **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *arguments: Any) -> None:
            pass

    return Answer
