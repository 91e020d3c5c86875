"""A connection to slurmrestd with faults: answers that are dropped, requests that arrive late."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress


class Wire:
    """Forwards TCP connections, one request each way. `cut` and `late` apply to the next POST only.

    `cut`: the request is forwarded, and the connection is closed before the answer. `late`: it is delayed until
    `let_through()`, while its sender gets no answer.
    """

    def __init__(self, port: int) -> None:
        self.behind = port
        self.cut = self.late = False
        self.posts = 0  # that were passed on
        self._held: list[bytes] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def let_through(self) -> None:
        """Deliver the late request; its sender has gone."""
        for request in self._held:
            self._pass_on(request)
        self._held.clear()

    @property
    def holds(self) -> bool:
        return bool(self._held)

    def close(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=[connection], daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection, suppress(OSError):
            while request := _message(connection):
                if request.startswith(b"POST") and self.late:
                    self.late = False
                    self._held.append(request)
                    return
                answer = self._pass_on(request)
                if request.startswith(b"POST") and self.cut:
                    self.cut = False
                    return
                connection.sendall(answer)

    def _pass_on(self, request: bytes) -> bytes:
        with socket.create_connection(("127.0.0.1", self.behind)) as server:
            server.sendall(request)
            answer = _message(server)
        self.posts += request.startswith(b"POST")
        return answer


@contextmanager
def wire(port: int) -> Iterator[Wire]:
    created = Wire(port)
    try:
        yield created
    finally:
        created.close()


def _message(connection: socket.socket) -> bytes:
    """Read one HTTP message by its Content-Length; empty if the other side has closed."""
    data = b""
    while b"\r\n\r\n" not in data:
        more = connection.recv(65_536)
        if not more:
            return b""
        data += more
    head, _, body = data.partition(b"\r\n\r\n")
    lengths = [line.split(b":")[1] for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
    left = int(lengths[0]) - len(body) if lengths else 0
    while left > 0:
        more = connection.recv(65_536)
        if not more:
            return b""
        data, left = data + more, left - len(more)
    return data
