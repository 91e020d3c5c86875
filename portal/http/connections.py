"""Connections whose request does not arrive are closed: each that stays open costs memory and a descriptor.

uvicorn closes a connection that is idle between two requests, and waits for ever for the first request, for the rest
of one, and for a body. Here a request's headers have 10 s from the connection's first moment, or from their own first
byte; a body may pause for no more than 10 s, and after its first 10 s has come at 1 kB a second or more on average.
While the application does not read what has come, it is the one who is slow, and the clock stands still.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

WAIT_S = 10.0
LEAST_BYTES_S = 1_000  # a post of 1 MB may take 17 minutes, a request of 2 kB 12 s
_TOO_SLOW = b"HTTP/1.1 408 Request Timeout\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"


class PatientProtocol(HttpToolsProtocol):
    """uvicorn's HTTP, with a bound on how long a request may take to arrive.

    One timer a connection: it looks at the deadline when it fires, so that a quick request only moves a number.
    """

    _timer: asyncio.TimerHandle | None = None
    _deadline = 0.0  # by the loop's clock; 0: nothing is awaited
    _body_began = 0.0  # 0: no body is being received
    _body_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._await_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        self._settle()
        if self._timer is not None:
            self._timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if not self._deadline and (self.cycle is None or self.cycle.response_complete):
            self._await_headers()  # of the connection's next request
        super().data_received(data)

    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        self._body_began, self._body_bytes = self.loop.time(), 0
        self._await(self._body_began + WAIT_S)

    def on_body(self, body: bytes) -> None:
        super().on_body(body)
        if self._body_began:
            self._body_bytes += len(body)
            slowest = self._body_began + WAIT_S + self._body_bytes / LEAST_BYTES_S
            self._await(min(self.loop.time() + WAIT_S, slowest))

    def on_message_complete(self) -> None:
        self._settle()
        super().on_message_complete()

    def handle_websocket_upgrade(self) -> None:
        self._settle()
        super().handle_websocket_upgrade()

    def _await_headers(self) -> None:
        self._body_began = 0.0
        self._await(self.loop.time() + WAIT_S)

    def _await(self, deadline: float) -> None:
        self._deadline = deadline
        if self._timer is None:
            self._timer = self.loop.call_at(deadline, self._check)

    def _settle(self) -> None:
        self._deadline = self._body_began = 0.0

    def _check(self) -> None:
        self._timer = None
        now = self.loop.time()
        if not self._deadline or self.transport.is_closing():
            return
        if self._body_began and self.flow.read_paused:
            self._body_began += WAIT_S
            self._await(now + WAIT_S)
        elif now < self._deadline:
            self._await(self._deadline)
        else:
            self._close()

    def _close(self) -> None:
        """Say why where a request had begun and nothing has been answered, and close."""
        cycle: Any = self.cycle
        if self._body_began and not cycle.response_started:
            self.transport.write(_TOO_SLOW)
        self.transport.close()
