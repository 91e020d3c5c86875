"""Post reports: batches of many streams as one columnar frame, and the connection that carries it (protocols.md §3)."""

from __future__ import annotations

import http.client
import json
import math
import zlib
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from training.reporting.lines import ReportBatch, StreamHeader

COMPRESSED_BYTES = 1024 * 1024  # the portal's limits
INFLATED_BYTES = 16 * 1024 * 1024
TIMEOUT_SECONDS = 30.0


@dataclass
class StreamPortion:
    """One stream's part of a post: its batches from `first` on, and whether it ends with them."""

    header: StreamHeader
    first: int
    batches: list[ReportBatch] = field(default_factory=list)
    end: bool = False

    @property
    def after(self) -> int:
        return self.first + len(self.batches)


def frame(portions: list[StreamPortion]) -> dict[str, Any]:
    """Return the JSON body: flat columns of steps and values per series, divided by runs; events separately."""
    series: dict[str, dict[str, list[Any]]] = {}
    events: list[dict[str, Any]] = []
    for index, portion in enumerate(portions):
        for number, batch in enumerate(portion.batches):
            for name, column in batch.series.items():
                if column:
                    columns = series.setdefault(name, {"runs": [], "step": [], "value": []})
                    columns["runs"].append([index, number, len(column)])
                    columns["step"] += [step for step, _ in column]
                    columns["value"] += [value if math.isfinite(value) else _word(value) for _, value in column]
            events += [{**event, "stream": index, "batch": number} for event in batch.events]
    return {"version": 1, "streams": [_stream(portion) for portion in portions], "series": series, "events": events}


def _stream(portion: StreamPortion) -> dict[str, Any]:
    header = portion.header
    return {
        "id": header.stream,
        "incarnation": header.incarnation,
        "rank": header.rank,
        "node": header.node,
        "boot_id": header.boot_id,
        "restart_count": header.restart_count,
        "first": portion.first,
        "times": [batch.time for batch in portion.batches],
        "end": portion.end,
    }


def _word(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    return "Infinity" if value > 0 else "-Infinity"


def pack(portions: list[StreamPortion]) -> bytes | None:
    """Return the compressed body, or None if it exceeds the limits of one post."""
    body = json.dumps(frame(portions), separators=(",", ":"), allow_nan=False).encode()
    if len(body) > INFLATED_BYTES:
        return None
    squeeze = zlib.compressobj(level=1, wbits=31)
    data = squeeze.compress(body) + squeeze.flush()
    return data if len(data) <= COMPRESSED_BYTES else None


@dataclass(frozen=True)
class PostResponse:
    """The portal's response.

    `cursors`: the seq with which each stream continues; `wait`: seconds to wait, if requested.
    """

    status: int
    cursors: dict[str, int] = field(default_factory=dict)
    wait: float = 0.0


class PortalUnreachable(Exception):
    """No response: the portal or the network is down. Whether the post was accepted is unknown."""


class PortalConnection:
    """One persistent connection to the portal. The token never appears in a message or an error."""

    def __init__(self, url: str, attempt: int, token: str) -> None:
        parts = urlsplit(url)
        if parts.scheme not in {"http", "https"} or not parts.hostname:
            raise ValueError(f"{url!r} is not the URL of a portal")
        self._path = f"{parts.path.rstrip('/')}/api/v1/attempts/{attempt}/reports"
        self._headers = {
            "Authorization": f"Bearer {token}",
            "Content-Type": "application/json",
            "Content-Encoding": "gzip",
        }
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        self._connection = kind(parts.hostname, parts.port, timeout=TIMEOUT_SECONDS)

    def post(self, body: bytes) -> PostResponse:
        """Send one post. A connection that the portal has closed is reopened: a repeated post is harmless."""
        fresh = self._connection.sock is None
        try:
            return self._post(body)
        except (OSError, http.client.HTTPException) as error:
            self._connection.close()
            if fresh or isinstance(error, TimeoutError):
                raise PortalUnreachable(type(error).__name__) from None
        try:
            return self._post(body)
        except (OSError, http.client.HTTPException) as error:
            self._connection.close()
            raise PortalUnreachable(type(error).__name__) from None

    def close(self) -> None:
        self._connection.close()

    def _post(self, body: bytes) -> PostResponse:
        self._connection.request("POST", self._path, body, self._headers)
        response = self._connection.getresponse()
        text = response.read(1 << 20)
        if response.will_close or response.read(1):
            self._connection.close()
        wait = response.headers.get("Retry-After", "")
        if response.status != 200:
            return PostResponse(response.status, wait=float(wait) if wait.isdecimal() and len(wait) < 6 else 0.0)
        return PostResponse(200, _cursors(text))


def _cursors(text: bytes) -> dict[str, int]:
    try:
        streams = json.loads(text)["streams"]
        return {str(stream): seq for stream, seq in streams.items() if type(seq) is int and seq >= 0}
    except (ValueError, KeyError, TypeError, AttributeError):
        raise http.client.HTTPException("the response is not from Vigil") from None
