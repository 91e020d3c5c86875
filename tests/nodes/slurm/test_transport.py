"""Test real connections: TLS with the authority of a site, and a Unix socket."""

from __future__ import annotations

import json
import ssl
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from socketserver import ThreadingMixIn, UnixStreamServer

import httpx
import pytest

from nodes.schedulers.base import SchedulerError
from nodes.schedulers.slurm.http import SlurmHttp, SlurmUnreachable
from nodes.schedulers.slurm.rest import SlurmRest
from nodes.schedulers.slurm.scheduler import Slurm
from tests.nodes.slurm.simulated_rest import TOKEN, VERSIONS, FixedToken, SimulatedRest, load, paths

NEWEST = VERSIONS[-1]


class Answering(BaseHTTPRequestHandler):
    """Slurm's answers over a real connection."""

    protocol_version = "HTTP/1.1"
    tokens_received: list[str] = []

    def do_GET(self) -> None:
        Answering.tokens_received.append(self.headers.get("X-SLURM-USER-TOKEN", ""))
        answer = paths(NEWEST) if self.path.startswith("/openapi") else load(NEWEST, "busy/slurm-nodes")
        body = json.dumps(answer.json()).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def address_string(self) -> str:
        return ""

    def log_message(self, *_: object) -> None:
        pass


class UnixServer(ThreadingMixIn, UnixStreamServer):
    daemon_threads = True


class QuietServer(ThreadingHTTPServer):
    def handle_error(self, *_: object) -> None:
        """Ignore clients that hang up because they do not trust the certificate."""


@contextmanager
def serving(server: ThreadingHTTPServer | UnixServer) -> Iterator[None]:
    Answering.tokens_received = []
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@contextmanager
def client(url: str, **options: str) -> Iterator[Slurm]:
    http = SlurmHttp(url, tokens=FixedToken(), user="portal", timeout_s=5, **options)  # type: ignore[arg-type]
    try:
        yield Slurm(SlurmRest(http), tokens=FixedToken(), user="portal")
    finally:
        http.close()


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a certificate for 127.0.0.1 that signs itself, one for another host, and their keys."""
    folder = tmp_path_factory.mktemp("tls")
    for name, alt in (("slurm", "IP:127.0.0.1"), ("other", "DNS:other.test")):
        subprocess.run(
            ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes",
             "-keyout", str(folder / f"{name}.key"), "-out", str(folder / f"{name}.pem"), "-days", "2",
             "-subj", f"/CN={name}.test", "-addext", f"subjectAltName={alt}"],
            check=True, capture_output=True,
        )  # fmt: skip
    return folder


@contextmanager
def tls(folder: Path, name: str) -> Iterator[str]:
    server = QuietServer(("127.0.0.1", 0), Answering)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / f"{name}.pem", folder / f"{name}.key")
    server.socket = context.wrap_socket(server.socket, server_side=True)
    with serving(server):
        yield f"https://127.0.0.1:{server.server_address[1]}"


def test_the_authority_of_a_site(authority: Path) -> None:
    with tls(authority, "slurm") as url, client(url, ca_file=str(authority / "slurm.pem")) as slurm:
        assert len(slurm.nodes()) == 8
        assert set(Answering.tokens_received) == {TOKEN}


@pytest.mark.parametrize(("server", "trusted"), [("slurm", ""), ("slurm", "other.pem"), ("other", "other.pem")])
def test_a_certificate_that_is_not_right_gets_no_token(authority: Path, server: str, trusted: str) -> None:
    ca_file = str(authority / trusted) if trusted else ""
    with tls(authority, server) as url, client(url, ca_file=ca_file) as slurm:
        with pytest.raises(SlurmUnreachable, match=r"certificate|CERTIFICATE"):
            slurm.nodes()
        assert Answering.tokens_received == []


def test_the_environment_cannot_add_trust(authority: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:9")
    with tls(authority, "slurm") as url, client(url, ca_file=str(authority / "slurm.pem")) as slurm:
        assert len(slurm.nodes()) == 8


@pytest.mark.parametrize("kind", ["missing", "folder", "no certificates"])
def test_authorities_that_are_none(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "ca.pem"
    if kind == "folder":
        path.mkdir()
    elif kind == "no certificates":
        path.write_text("hello")
    with pytest.raises(SchedulerError, match="VIGIL_SLURM_CA_FILE") as refused:
        SlurmHttp("https://127.0.0.1:1", tokens=FixedToken(), user="portal", ca_file=str(path))
    assert str(path) in str(refused.value)


def test_a_unix_socket(tmp_path: Path) -> None:
    path = tmp_path / "rest.sock"
    with serving(UnixServer(str(path), Answering)), client(f"unix:{path}") as slurm:
        assert len(slurm.nodes()) == 8
        assert Answering.tokens_received


@pytest.mark.parametrize("number", [301, 302, 307, 308])
def test_who_sends_us_elsewhere_is_neither_followed_nor_believed(number: int) -> None:
    played = SimulatedRest(VERSIONS[-1])
    away = httpx.Response(number, json={"jobs": []}, headers={"Location": "http://elsewhere/"})
    played.answers["/jobs"] = away
    with pytest.raises(SchedulerError, match=f"HTTP {number}"):
        played.rest.jobs()
    assert {request.url.host for request in played.requests} == {"slurm.test"}
