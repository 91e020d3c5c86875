"""Close connections whose request does not arrive, or whose response is not read: each costs memory.

uvicorn closes a connection that is idle between two requests, but waits forever for the first request, for the rest of
one, for a body, and for a client that does not read. Here

- a request's headers have 10 s from the start of the connection, or from their own first byte, and 64 kB;
- a body may pause for no more than 10 s, and after its first 10 s must average 1 kB a second or more. While the
  application does not read what has arrived, the clock stops;
- a client must read at least 10 kB every 10 s of a pending response.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

WAIT_S = 10.0
MIN_BYTES_S = 1_000  # a post of 1 MB may take 17 minutes, a request of 2 kB 12 s
# No legitimate cookies, query and token are longer; httptools would collect any amount. In one-byte chunks, a body has
# five bytes of framing for each byte of content.
HEAD_BYTES, FRAMING = 64 * 1024, 8
_TOO_SLOW = b"HTTP/1.1 408 Request Timeout\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
_TOO_LARGE = b"HTTP/1.1 431 Request Header Fields Too Large\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"


class PatientProtocol(HttpToolsProtocol):
    """uvicorn's HTTP protocol with limits on the time a request takes to arrive, on its headers, and on slow readers.

    Each connection has one timer, which checks the deadline when it fires, so that a quick request only changes a
    number.
    """

    _timer: asyncio.TimerHandle | None = None
    _deadline = 0.0  # on the loop's clock; 0: nothing is awaited
    _body_began = 0.0  # 0: no body is being received
    _body_bytes = 0
    _head_bytes = 0  # received of this request outside of its body
    _reader_timer: asyncio.TimerHandle | None = None
    _unread = 0
    _answering: RequestResponseCycle | None = None  # of pipelined requests, `cycle` is the last one received

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._await_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        self._settle()
        for timer in (self._timer, self._reader_timer):
            if timer is not None:
                timer.cancel()
        self._forget_client()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if not self._deadline and (self.cycle is None or self.cycle.response_complete):
            self._await_headers()  # of the connection's next request
        self._head_bytes += len(data)
        super().data_received(data)
        if self._head_bytes > HEAD_BYTES + FRAMING * self._body_bytes and not self.transport.is_closing():
            self._close(_TOO_LARGE)

    def on_message_begin(self) -> None:
        self._head_bytes = self._body_bytes = 0
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        self._body_began = self.loop.time()
        self._await(self._body_began + WAIT_S)

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._answering = cycle
        super()._start_asgi_task(cycle, app)

    def on_body(self, body: bytes) -> None:
        super().on_body(body)
        self._body_bytes += len(body)
        self._head_bytes -= len(body)
        if self._body_began:
            slowest = self._body_began + WAIT_S + self._body_bytes / MIN_BYTES_S
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
            self._close(_TOO_SLOW if self._body_began else b"")

    def _close(self, answer: bytes) -> None:
        """Close the connection; send the reason if no part of an answer has been sent."""
        cycle: Any = self.cycle
        if cycle is None or cycle.response_complete or not cycle.response_started:
            self.transport.write(answer)
        self._forget_client()
        self.transport.close()

    def _forget_client(self) -> None:
        """Discard the application's answer: writing to a closed connection would be logged as an error."""
        self.pipeline.clear()
        if self._answering is not None and not self._answering.response_complete:
            self._answering.disconnected = True
            self._answering.message_event.set()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._unread = self.transport.get_write_buffer_size()
        if self._reader_timer is None:
            self._reader_timer = self.loop.call_later(WAIT_S, self._check_reader)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._reader_timer is not None:
            self._reader_timer.cancel()
            self._reader_timer = None

    def _check_reader(self) -> None:
        """Abort the connection of a client that reads nearly nothing; an orderly close would wait for it."""
        self._reader_timer = None
        before, self._unread = self._unread, self.transport.get_write_buffer_size()
        if before - self._unread < WAIT_S * MIN_BYTES_S:
            self._forget_client()
            self.transport.abort()
        else:
            self._reader_timer = self.loop.call_later(WAIT_S, self._check_reader)
