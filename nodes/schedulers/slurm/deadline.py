"""Bound all reads and writes of one HTTP exchange by one deadline.

httpx limits each read and write separately, and there may be thousands: a peer that sends one header byte now and then
could keep us busy for hours.
"""

from __future__ import annotations

import math
import ssl
import time
from collections.abc import Iterable
from typing import Any

import httpcore
import httpx

IDLE_S = 5.0  # kept open between requests, as httpx does


class Deadline(httpcore.NetworkBackend):
    """A network backend whose reads and writes must all finish by `until` (monotonic seconds). For one thread."""

    def __init__(self) -> None:
        self.until = math.inf
        self._inner = httpcore.SyncBackend()

    def left(self, timeout: float | None, error_type: type[Exception]) -> float | None:
        """Return the timeout for a single read or write; raise `error_type` once the deadline has passed."""
        left = self.until - time.monotonic()
        if left <= 0:
            raise error_type("not complete in time")
        return timeout if left == math.inf else min(left, math.inf if timeout is None else timeout)

    def connect_tcp(
        self, host: str, port: int, timeout: float | None = None, local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.NetworkStream:  # fmt: skip
        return _DeadlineStream(self, self._inner.connect_tcp(host, port, timeout, local_address, socket_options))

    def connect_unix_socket(
        self, path: str, timeout: float | None = None, socket_options: Iterable[Any] | None = None
    ) -> httpcore.NetworkStream:
        return _DeadlineStream(self, self._inner.connect_unix_socket(path, timeout, socket_options))

    def sleep(self, seconds: float) -> None:
        self._inner.sleep(seconds)


class _DeadlineStream(httpcore.NetworkStream):
    def __init__(self, deadline: Deadline, inner: httpcore.NetworkStream) -> None:
        self._deadline, self._inner = deadline, inner

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        return self._inner.read(max_bytes, self._deadline.left(timeout, httpcore.ReadTimeout))

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        self._inner.write(buffer, self._deadline.left(timeout, httpcore.WriteTimeout))

    def close(self) -> None:
        self._inner.close()

    def start_tls(
        self, ssl_context: ssl.SSLContext, server_hostname: str | None = None, timeout: float | None = None
    ) -> httpcore.NetworkStream:
        return _DeadlineStream(self._deadline, self._inner.start_tls(ssl_context, server_hostname, timeout))

    def get_extra_info(self, info: str) -> Any:
        return self._inner.get_extra_info(info)


class DeadlineTransport(httpx.HTTPTransport):
    """httpx's transport with a deadline, over TCP or, with `uds`, a Unix socket."""

    def __init__(self, deadline: Deadline, *, uds: str | None = None, verify: ssl.SSLContext | None = None) -> None:
        context = verify or ssl.create_default_context()
        super().__init__(verify=context, uds=uds)
        # httpx has no parameter for a network backend; otherwise this is the pool that it would create itself.
        self._pool = httpcore.ConnectionPool(
            ssl_context=context, uds=uds, keepalive_expiry=IDLE_S, network_backend=deadline
        )
