"""Check whether the web process answers yet, without blocking."""

from __future__ import annotations

import socket


def address_of(listener: socket.socket) -> str:
    """Return the address at which this machine reaches the listener, as host:port."""
    host, port = listener.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


class Probe:
    """Send one request to web, so that it has loaded its pages before the first person visits; never blocks."""

    def __init__(self, listener: socket.socket) -> None:
        self.answered = False
        host, _, port = address_of(listener).rpartition(":")
        self.address = (host.strip("[]"), int(port))
        self._connect()

    def _connect(self) -> None:
        self.socket = socket.create_connection(self.address, timeout=5)
        host = "127.0.0.1" if ":" not in self.address[0] else "[::1]"
        self.socket.sendall(f"GET /healthz HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
        self.socket.setblocking(False)

    def poll(self) -> None:
        if self.answered:
            return
        try:
            data = self.socket.recv(64)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        self.answered = data.startswith(b"HTTP/")
        if not self.answered:  # the process that had accepted the connection died
            self.socket.close()
            self._connect()

    def __enter__(self) -> Probe:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()
