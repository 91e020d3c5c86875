"""Report posts: batches of many streams as one columnar frame, and the connection that carries it (protocols.md §3)."""

from __future__ import annotations

import http.client
import json
import math
import zlib
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from training.reporting.lines import Batch, Header

COMPRESSED_BYTES = 1024 * 1024  # the portal's limits
INFLATED_BYTES = 16 * 1024 * 1024
TIMEOUT_SECONDS = 30.0


@dataclass
class Portion:
    """What a post brings of one stream: its batches from `first` on, and whether it ends with them."""

    header: Header
    first: int
    batches: list[Batch] = field(default_factory=list)
    end: bool = False

    @property
    def after(self) -> int:
        return self.first + len(self.batches)


def frame(portions: list[Portion]) -> dict[str, Any]:
    """The JSON body: a flat column of steps and one of values a series, cut by runs; events beside."""
    series: dict[str, dict[str, list[Any]]] = {}
    events: list[dict[str, Any]] = []
    for index, portion in enumerate(portions):
        for place, batch in enumerate(portion.batches):
            for name, column in batch.series.items():
                if column:
                    into = series.setdefault(name, {"runs": [], "step": [], "value": []})
                    into["runs"].append([index, place, len(column)])
                    into["step"] += [step for step, _ in column]
                    into["value"] += [value if math.isfinite(value) else _word(value) for _, value in column]
            events += [{**event, "stream": index, "batch": place} for event in batch.events]
    return {"version": 1, "streams": [_stream(portion) for portion in portions], "series": series, "events": events}


def _stream(portion: Portion) -> dict[str, Any]:
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


def packed(portions: list[Portion]) -> bytes | None:
    """The body as it travels, or None where it is more than one post may be."""
    body = json.dumps(frame(portions), separators=(",", ":"), allow_nan=False).encode()
    if len(body) > INFLATED_BYTES:
        return None
    squeeze = zlib.compressobj(level=1, wbits=31)
    data = squeeze.compress(body) + squeeze.flush()
    return data if len(data) <= COMPRESSED_BYTES else None


@dataclass(frozen=True)
class Answer:
    """`cursors`: the seq that each stream goes on with, where the post was taken. `wait`: what the portal asked for."""

    status: int
    cursors: dict[str, int] = field(default_factory=dict)
    wait: float = 0.0


class Unreachable(Exception):
    """No answer: the portal is off, or the way to it. Whether the post was taken is unknown."""


class Portal:
    """One kept-alive connection to where an attempt's reports go. The token is never part of a message or an error."""

    def __init__(self, url: str, attempt: int, token: str) -> None:
        parts = urlsplit(url)
        if parts.scheme not in {"http", "https"} or not parts.hostname:
            raise ValueError(f"{url!r} is no address of a portal")
        self._path = f"{parts.path.rstrip('/')}/api/v1/attempts/{attempt}/reports"
        self._headers = {
            "Authorization": f"Bearer {token}",
            "Content-Type": "application/json",
            "Content-Encoding": "gzip",
        }
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        self._connection = kind(parts.hostname, parts.port, timeout=TIMEOUT_SECONDS)

    def post(self, body: bytes) -> Answer:
        """Send one post. A connection that the portal has closed meanwhile is opened again: a repeat is harmless."""
        fresh = self._connection.sock is None
        try:
            return self._post(body)
        except (OSError, http.client.HTTPException) as error:
            self._connection.close()
            if fresh or isinstance(error, TimeoutError):
                raise Unreachable(type(error).__name__) from None
        try:
            return self._post(body)
        except (OSError, http.client.HTTPException) as error:
            self._connection.close()
            raise Unreachable(type(error).__name__) from None

    def close(self) -> None:
        self._connection.close()

    def _post(self, body: bytes) -> Answer:
        self._connection.request("POST", self._path, body, self._headers)
        response = self._connection.getresponse()
        text = response.read(1 << 20)
        if response.will_close or response.read(1):
            self._connection.close()
        wait = response.headers.get("Retry-After", "")
        if response.status != 200:
            return Answer(response.status, wait=float(wait) if wait.isdecimal() and len(wait) < 6 else 0.0)
        return Answer(200, _cursors(text))


def _cursors(text: bytes) -> dict[str, int]:
    try:
        found = json.loads(text)["streams"]
        return {str(stream): seq for stream, seq in found.items() if type(seq) is int and seq >= 0}
    except (ValueError, KeyError, TypeError, AttributeError):
        raise http.client.HTTPException("the answer is none of ours") from None
