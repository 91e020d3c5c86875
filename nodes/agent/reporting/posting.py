"""Post batches as one gzipped body over a persistent connection (protocols.md §11)."""

from __future__ import annotations

import email.utils
import http.client
import json
import socket
import time
import zlib
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import quote, urlsplit

from nodes.agent.cleaning import clean
from nodes.agent.gpus.samples import COLUMNS
from nodes.agent.version import VERSION

COMPRESSED_BYTES = 1024 * 1024  # the portal's limits, as are the next four
INFLATED_BYTES = 8 * 1024 * 1024
EVENTS = 2_000
VALUES = 50_000
BATCHES = 60
TIMEOUT_SECONDS = 30.0
MAX_RESPONSE_BYTES = 64 * 1024
MAX_WAIT_S = 300.0
_GZIP = 31


@dataclass(frozen=True)
class PlantRequest:
    """A fault that a game day of the portal wants planted on this node. The portal numbers them, ever upwards."""

    id: int
    fault: str
    seconds: float

    @classmethod
    def parse(cls, value: object) -> PlantRequest | None:
        """Return the request of a response; None if there is none, or none that can be read."""
        if not isinstance(value, dict):
            return None
        number, fault, seconds = value.get("id"), value.get("fault"), value.get("seconds")
        if type(number) is not int or not 0 < number < 2**53 or not isinstance(fault, str):
            return None
        if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 < seconds < 86_400:
            return None
        return cls(number, clean(fault, 32), float(seconds))


@dataclass(frozen=True)
class PortalResponse:
    """A response of the portal.

    `next`: the batch number to continue with, if the post was accepted. `wait`: the requested delay in seconds.
    """

    status: int
    next: int | None = None
    token: str = ""
    detail: str = ""
    wait: float = 0.0
    clock_ahead: float = 0.0
    """Whole seconds by which this machine's clock is ahead of the portal's."""
    plant: PlantRequest | None = None


class PortalUnreachable(Exception):
    """No response: the portal or the network is down. Whether the post was accepted is unknown."""


def fitting(batches: Sequence[bytes]) -> int:
    """Return how many batches fit into one post, at least one."""
    size = events = values = 0
    for place, batch in enumerate(batches[:BATCHES]):
        size += len(batch)
        events += batch.count(b'"kind":')
        values += _values(batch)
        if place and (size > INFLATED_BYTES or events > EVENTS or values > VALUES):
            return place
    return min(len(batches), BATCHES)


def _values(batch: bytes) -> int:
    """Count a batch's column values from its beginning; relies on the format of `nodes.agent.reporting.batches`."""
    head, _, rest = batch[:16_384].partition(b',"gpus":[')
    gpus = rest.partition(b"]")[0]
    with suppress(ValueError):
        return int(head.rpartition(b":")[2]) * len(COLUMNS) * (gpus.count(b",") + 1 if gpus else 0)
    return 0


def body(*, stream: str, first: int, given_up: int, boot_id: str, batches: Sequence[bytes]) -> bytes:
    """Return the compressed body of a post."""
    head = {
        "version": 1,
        "stream": stream,
        "first": first,
        "given_up": given_up,
        "boot_id": boot_id,
        "sent_at": round(time.time(), 3),
        "agent": VERSION,
    }
    plain = json.dumps(head, separators=(",", ":")).encode()[:-1] + b',"batches":[' + b",".join(batches) + b"]}"
    squeeze = zlib.compressobj(level=1, wbits=_GZIP)
    return squeeze.compress(plain) + squeeze.flush()


class ReportClient:
    """A persistent connection for a node's reports. Messages and errors never contain a token."""

    def __init__(self, url: str, node: str, *, timeout: float = TIMEOUT_SECONDS) -> None:
        parts = urlsplit(url)
        self._path = f"{parts.path.rstrip('/')}/api/v1/nodes/{quote(node, safe='')}"
        self._is_tls, self._host, self._port = parts.scheme == "https", parts.hostname or "", parts.port
        self._timeout = timeout
        self._connection: http.client.HTTPConnection | None = None
        self.began: float | None = None
        """When the current post began, by the monotonic clock; None between posts."""

    def post(self, packed: bytes, token: str) -> PortalResponse:
        """Send batches. If the portal has closed the connection, reconnect and repeat: a repeat is harmless."""
        return self._request("telemetry", packed, token, {"Content-Encoding": "gzip"})

    def enrol(self, boot_id: str, secret: str) -> PortalResponse:
        """Request a token for this node."""
        return self._request("token", json.dumps({"boot_id": boot_id}).encode(), secret, {})

    def interrupt(self) -> None:
        """Abort a post that takes too long, from another thread."""
        connection = self._connection
        if connection is not None and connection.sock is not None:
            with suppress(OSError):
                connection.sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
        self._connection = None

    def _request(self, endpoint: str, data: bytes, bearer: str, more: dict[str, str]) -> PortalResponse:
        headers = {"Authorization": f"Bearer {bearer}", "Content-Type": "application/json", **more}
        self.began = time.monotonic()
        try:
            return self._post_with_retry(f"{self._path}/{endpoint}", data, headers)
        finally:
            self.began = None

    def _post_with_retry(self, path: str, data: bytes, headers: dict[str, str]) -> PortalResponse:
        is_fresh = self._connection is None or self._connection.sock is None
        try:
            return self._post_once(path, data, headers)
        except (OSError, http.client.HTTPException) as error:
            self.close()
            if is_fresh or isinstance(error, TimeoutError):
                raise PortalUnreachable(_describe_error(error)) from None
        try:
            return self._post_once(path, data, headers)
        except (OSError, http.client.HTTPException) as error:
            self.close()
            raise PortalUnreachable(_describe_error(error)) from None

    def _post_once(self, path: str, data: bytes, headers: dict[str, str]) -> PortalResponse:
        if self._connection is None:
            self._connection = self._connect()
        self._connection.request("POST", path, data, headers)
        response = self._connection.getresponse()
        text = response.read(MAX_RESPONSE_BYTES)
        if response.will_close or response.read(1):
            self.close()
        answer = _parse_response(response.status, response.headers.get("Retry-After", ""), text)
        return replace(answer, clock_ahead=_clock_ahead(response.headers.get("Date", "")))

    def _connect(self) -> http.client.HTTPConnection:
        if not self._is_tls:
            return http.client.HTTPConnection(self._host, self._port, timeout=self._timeout)
        return http.client.HTTPSConnection(self._host, self._port, timeout=self._timeout)


def _parse_response(status: int, retry_after: str, text: bytes) -> PortalResponse:
    wait = min(float(retry_after), MAX_WAIT_S) if retry_after.isdecimal() and len(retry_after) < 6 else 0.0
    found = _object(text)
    if status in {200, 201}:
        number, token = found.get("next"), found.get("token")
        is_number = type(number) is int and 0 <= number < 2**53
        return PortalResponse(
            status, number if is_number else None, token if isinstance(token, str) else "",
            plant=PlantRequest.parse(found.get("plant")),
        )  # fmt: skip
    detail = found.get("detail")
    errors = found.get("errors")
    if isinstance(errors, list) and errors and isinstance(errors[0], dict):
        detail = f"{errors[0].get('field')}: {errors[0].get('message')}"
    return PortalResponse(status, detail=clean(str(detail or ""), 300), wait=wait)


def _object(text: bytes) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _clock_ahead(date: str) -> float:
    date_tuple = email.utils.parsedate_tz(date)
    return time.time() - email.utils.mktime_tz(date_tuple) if date_tuple else 0.0


def _describe_error(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return "no response in time"
    return clean(str(error) or type(error).__name__, 200)
