"""Test what `vigil` prints if no portal answers: one line, with the cause and what to do about it."""

import contextlib
import socket
import ssl
import threading

import httpx
import pytest
from click.testing import CliRunner

from vigil_cli import portal
from vigil_cli.main import main


@pytest.fixture(autouse=True)
def alone(tmp_path, monkeypatch):
    """A token, and no address but what a test gives."""
    monkeypatch.setenv("VIGIL_TOKEN", "secret")
    monkeypatch.delenv("VIGIL_URL", raising=False)
    monkeypatch.setenv("VIGIL_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setattr(portal, "RETRY_S", 0)


def complaint() -> str:
    """The one line of a command that fails."""
    result = CliRunner().invoke(main, ["nodes"])
    assert result.exit_code == 1, result.output + repr(result.exception)
    (line,) = result.stderr.splitlines()
    assert line.startswith("vigil: ")
    return line.removeprefix("vigil: ")


def nobody(cause: Exception | None = None, kind: type[httpx.TransportError] = httpx.ConnectError) -> Exception:
    error = kind(str(cause or "gone"))
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (nobody(OSError(113, "No route to host")), "Nothing answers at http://portal ([Errno 113] No route to host)."),
        (nobody(kind=httpx.ConnectTimeout), "Connecting to http://portal timed out."),
        (nobody(kind=httpx.ReadTimeout), "http://portal accepted the request but did not answer in time."),
        (nobody(kind=httpx.ReadError), "http://portal closed the connection before it answered (gone)."),
        (nobody(ssl.SSLCertVerificationError(1, "self-signed")), "SSL_CERT_FILE"),
    ],
)
def test_a_silent_portal_is_one_line_with_a_remedy(monkeypatch, error, message):
    def answer(request: httpx.Request) -> httpx.Response:
        raise error

    monkeypatch.setenv("VIGIL_URL", "http://portal")
    transport = httpx.MockTransport(answer)
    monkeypatch.setattr(portal.Portal, "http", httpx.Client(base_url="http://portal/api/v1/", transport=transport))
    assert message in complaint()


def served(answer: bytes) -> tuple[socket.socket, int]:
    """A port where everybody gets the same bytes."""
    listening = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                peer, _ = listening.accept()
                peer.recv(65_536)
                peer.sendall(answer)
                peer.close()

    threading.Thread(target=serve, daemon=True).start()
    return listening, listening.getsockname()[1]


def test_an_address_where_no_portal_is(monkeypatch, tmp_path):
    def complaint_about(url: str) -> str:
        monkeypatch.setenv("VIGIL_URL", url)
        return complaint()

    with socket.create_server(("127.0.0.1", 0)) as closed:
        url = f"http://127.0.0.1:{closed.getsockname()[1]}"
    start = "Start the portal with `vigil up`. If it runs elsewhere, set its address in"
    assert complaint_about(url) == f"Nothing answers at {url}. {start} VIGIL_URL."
    monkeypatch.delenv("VIGIL_URL")
    path = tmp_path / "home" / "cli.toml"
    path.parent.mkdir()
    path.write_text(f'url = "{url}"\ntoken = "t"\n')
    assert complaint() == f"Nothing answers at {url}. {start} {path}."
    assert "Unknown host no-such-machine.invalid" in complaint_about("http://no-such-machine.invalid")
    assert complaint_about("portal:8000").startswith(
        '"portal:8000" is not an address. Write it with http:// or https://'
    )
    assert "is not an address" in complaint_about("http://[::1")
    page = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nConnection: close\r\n\r\nhello"
    moved = b"HTTP/1.1 301 Moved\r\nLocation: https://portal/\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
    for answer, scheme, word in (
        (page, "http", "is not a Vigil portal"),
        (page, "https", "does not use TLS"),
        (moved, "http", "redirects to https://portal/"),
        (b"", "http", "closed the connection"),
    ):
        listening, port = served(answer)
        with listening:
            assert word in complaint_about(f"{scheme}://127.0.0.1:{port}")
