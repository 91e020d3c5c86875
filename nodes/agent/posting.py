"""Posts: batches as one gzipped body, and the connection that carries them (protocols.md §11)."""

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
from nodes.agent.version import VERSION

COMPRESSED_BYTES = 1024 * 1024  # the portal's limits
INFLATED_BYTES = 8 * 1024 * 1024
EVENTS = 2_000
VALUES = 50_000
BATCHES = 60
COLUMNS = 12
TIMEOUT_SECONDS = 30.0
MOST_ANSWER = 64 * 1024
LONGEST_WAIT = 300.0
_GZIP = 31


@dataclass(frozen=True)
class Answer:
    """`next`: the number to go on with, where the post was taken. `wait`: what the portal asked for, in seconds."""

    status: int
    next: int | None = None
    token: str = ""
    detail: str = ""
    wait: float = 0.0
    clock_ahead: float = 0.0
    """Seconds that this machine's clock is ahead of the portal's, to the second."""


class Unreachable(Exception):
    """No answer: the portal is off, or the way to it. Whether the post was taken is unknown."""


def fitting(batches: Sequence[bytes]) -> int:
    """How many of them fit into one post, one at least."""
    size = events = values = 0
    for place, batch in enumerate(batches[:BATCHES]):
        size += len(batch)
        events += batch.count(b'"kind":')
        values += _values(batch)
        if place and (size > INFLATED_BYTES or events > EVENTS or values > VALUES):
            return place
    return min(len(batches), BATCHES)


def _values(batch: bytes) -> int:
    """What columns of it hold, by its first lines alone: the batch is written as `nodes.agent.batches` does."""
    head, _, rest = batch[:16_384].partition(b',"gpus":[')
    gpus = rest.partition(b"]")[0]
    with suppress(ValueError):
        return int(head.rpartition(b":")[2]) * COLUMNS * (gpus.count(b",") + 1 if gpus else 0)
    return 0


def body(*, stream: str, first: int, given_up: int, boot_id: str, batches: Sequence[bytes]) -> bytes:
    """A post as it travels."""
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


class Portal:
    """One kept-alive connection to where a node's reports go. No token is ever part of a message or an error."""

    def __init__(self, url: str, node: str, *, timeout: float = TIMEOUT_SECONDS) -> None:
        parts = urlsplit(url)
        self._path = f"{parts.path.rstrip('/')}/api/v1/nodes/{quote(node, safe='')}"
        self._is_tls, self._host, self._port = parts.scheme == "https", parts.hostname or "", parts.port
        self._timeout = timeout
        self._connection: http.client.HTTPConnection | None = None
        self.began: float | None = None
        """Since when a post is under way, by the monotonic clock."""

    def post(self, packed: bytes, token: str) -> Answer:
        """Send batches. A connection that the portal has closed meanwhile is opened again: a repeat is harmless."""
        return self._ask("telemetry", packed, token, {"Content-Encoding": "gzip"})

    def enrol(self, boot_id: str, secret: str) -> Answer:
        """Ask for this node's own token."""
        return self._ask("token", json.dumps({"boot_id": boot_id}).encode(), secret, {})

    def interrupt(self) -> None:
        """End a post that takes too long, from another thread."""
        connection = self._connection
        if connection is not None and connection.sock is not None:
            with suppress(OSError):
                connection.sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
        self._connection = None

    def _ask(self, what: str, data: bytes, bearer: str, more: dict[str, str]) -> Answer:
        headers = {"Authorization": f"Bearer {bearer}", "Content-Type": "application/json", **more}
        self.began = time.monotonic()
        try:
            return self._twice(f"{self._path}/{what}", data, headers)
        finally:
            self.began = None

    def _twice(self, path: str, data: bytes, headers: dict[str, str]) -> Answer:
        is_fresh = self._connection is None or self._connection.sock is None
        try:
            return self._once(path, data, headers)
        except (OSError, http.client.HTTPException) as error:
            self.close()
            if is_fresh or isinstance(error, TimeoutError):
                raise Unreachable(_why(error)) from None
        try:
            return self._once(path, data, headers)
        except (OSError, http.client.HTTPException) as error:
            self.close()
            raise Unreachable(_why(error)) from None

    def _once(self, path: str, data: bytes, headers: dict[str, str]) -> Answer:
        if self._connection is None:
            self._connection = self._connect()
        self._connection.request("POST", path, data, headers)
        response = self._connection.getresponse()
        text = response.read(MOST_ANSWER)
        if response.will_close or response.read(1):
            self.close()
        answer = _answer(response.status, response.headers.get("Retry-After", ""), text)
        return replace(answer, clock_ahead=_ahead(response.headers.get("Date", "")))

    def _connect(self) -> http.client.HTTPConnection:
        if not self._is_tls:
            return http.client.HTTPConnection(self._host, self._port, timeout=self._timeout)
        return http.client.HTTPSConnection(self._host, self._port, timeout=self._timeout)


def _answer(status: int, retry_after: str, text: bytes) -> Answer:
    wait = min(float(retry_after), LONGEST_WAIT) if retry_after.isdecimal() and len(retry_after) < 6 else 0.0
    found = _object(text)
    if status in {200, 201}:
        number, token = found.get("next"), found.get("token")
        is_number = type(number) is int and 0 <= number < 2**53
        return Answer(status, number if is_number else None, token if isinstance(token, str) else "")
    detail = found.get("detail")
    errors = found.get("errors")
    if isinstance(errors, list) and errors and isinstance(errors[0], dict):
        detail = f"{errors[0].get('field')}: {errors[0].get('message')}"
    return Answer(status, detail=clean(str(detail or ""), 300), wait=wait)


def _object(text: bytes) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _ahead(date: str) -> float:
    told = email.utils.parsedate_tz(date)
    return time.time() - email.utils.mktime_tz(told) if told else 0.0


def _why(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return "it does not answer in time"
    return clean(str(error) or type(error).__name__, 200)
