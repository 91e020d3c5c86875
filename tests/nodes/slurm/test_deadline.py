"""Test that calls end when a slurmrestd, or what listens in its place, sends only a byte now and then."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing, suppress

import pytest

from nodes.schedulers.slurm.http import SlurmHttp, SlurmUnreachable
from tests.nodes.slurm.simulated_rest import FixedToken

EVERY_S = 0.02


@pytest.fixture(params=[b"HTTP/1.1 200 OK\r\nX-Pad: ", b"HTTP/1.1 ", b""], ids=["header", "status", "garbage"])
def dripping(request: pytest.FixtureRequest) -> Iterator[str]:
    """Yield the address of a server that begins its answer and then sends a letter at a time."""
    listener = socket.create_server(("127.0.0.1", 0))

    def drip(peer: socket.socket) -> None:
        with suppress(OSError), closing(peer):
            peer.recv(65_536)
            peer.sendall(request.param)
            while True:
                peer.sendall(b"x")
                time.sleep(EVERY_S)

    def serve() -> None:
        with suppress(OSError):
            while True:
                threading.Thread(target=drip, args=(listener.accept()[0],), daemon=True).start()

    threading.Thread(target=serve, daemon=True).start()
    yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()


def test_an_answer_without_end_is_given_up(dripping: str) -> None:
    http = SlurmHttp(dripping, tokens=FixedToken(), user="portal", timeout_s=0.2)
    failed: list[BaseException] = []

    def request() -> None:
        try:
            http.get("nodes")
        except SlurmUnreachable as error:
            failed.append(error)

    thread = threading.Thread(target=request, daemon=True)
    thread.start()
    thread.join(10)
    assert failed, "it still waits"
    assert "did not respond in time" in str(failed[0])
