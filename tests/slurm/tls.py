"""A TLS proxy in front of a slurmrestd, which has no TLS itself."""

from __future__ import annotations

import socket
import socketserver
import ssl
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def tls_before(port: int, folder: Path) -> Iterator[str]:
    """Run a proxy with a self-signed certificate, folder/proxy.pem, in front of a port of this machine."""
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2",
         "-keyout", str(folder / "proxy.key"), "-out", str(folder / "proxy.pem"), "-subj", "/CN=slurm.test",
         "-addext", "subjectAltName=IP:127.0.0.1"],
        check=True, capture_output=True,
    )  # fmt: skip
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "proxy.pem", folder / "proxy.key")

    class Passing(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            with (
                suppress(OSError),
                context.wrap_socket(self.request, server_side=True) as inside,
                socket.create_connection(("127.0.0.1", port)) as behind,
            ):
                threading.Thread(target=pump, args=(behind, inside), daemon=True).start()
                pump(inside, behind)

    def pump(source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(65_536):
                target.sendall(data)

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Passing) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"https://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
