"""POST /api/v1/attempts/<id>/reports: the shippers' door.

In the web process it is an ASGI application of its own (`Intake`) before Django's middleware, which would cost as much
as taking the report and would open a database connection for each; the operation below is the same for everything else.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
from django.db import DatabaseError, connection
from django.http import HttpRequest, HttpResponse
from ninja import Router

from jobs.intake import reports, wire
from portal.http import problems
from portal.http.openapi import described
from portal.http.problems import Problem

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]

PATH = re.compile(r"/api/v1/attempts/(\d{1,18})/reports")
WAITING = 256  # posts in hand at most; a shipper that is turned away comes again

router = Router(tags=["reports"])

_COLUMNS = {
    "type": "object",
    "required": ["runs", "step", "value"],
    "properties": {
        "runs": {
            "type": "array",
            "items": {"type": "array", "items": {"type": "integer"}, "minItems": 3, "maxItems": 3},
            "description": "[stream index, batch index, number of points], cutting the columns.",
        },
        "step": {"type": "array", "items": {"type": "integer", "minimum": 0}},
        "value": {
            "type": "array",
            "items": {"anyOf": [{"type": "number"}, {"enum": ["NaN", "Infinity", "-Infinity"]}]},
        },
    },
}
_STREAM = {
    "type": "object",
    "required": ["id", "incarnation", "rank", "first", "times"],
    "properties": {
        "id": {"type": "string", "pattern": "^[0-9a-f]{16}$"},
        "incarnation": {"type": "integer", "minimum": 0},
        "rank": {"type": "integer"},
        "node": {"type": "string"},
        "boot_id": {"type": "string"},
        "restart_count": {"type": "integer", "minimum": 0},
        "first": {"type": "integer", "minimum": 0, "description": "seq of the first batch"},
        "times": {"type": "array", "items": {"type": "number"}, "description": "Unix seconds, one a batch"},
        "end": {"type": "boolean"},
    },
}
_POST = {
    "type": "object",
    "required": ["version", "streams"],
    "properties": {
        "version": {"const": 1},
        "streams": {"type": "array", "items": _STREAM},
        "series": {"type": "object", "additionalProperties": _COLUMNS},
        "events": {
            "type": "array",
            "items": {
                "type": "object",
                "required": ["stream", "batch", "kind", "time"],
                "properties": {
                    "stream": {"type": "integer"},
                    "batch": {"type": "integer"},
                    "kind": {"type": "string"},
                    "time": {"type": "number"},
                },
            },
        },
    },
}
_TAKEN = {
    "type": "object",
    "required": ["streams", "version"],
    "properties": {
        "streams": {
            "type": "object",
            "additionalProperties": {"type": "integer"},
            "description": "The seq that each stream goes on with.",
        },
        "version": {"type": "integer"},
    },
}


@router.post(
    "/attempts/{attempt_id}/reports",
    auth=None,
    throttle=[],
    summary="Take what an attempt's ranks report",
    openapi_extra=described(
        {
            "requestBody": {"required": True, "content": {"application/json": {"schema": _POST}}},
            "responses": {200: {"description": "Taken.", "content": {"application/json": {"schema": _TAKEN}}}},
            "security": [{"Bearer": []}],
        },
        errors={
            401: "The attempt has ended, or the token is another's.",
            413: "It is larger than one post may be: send less at once.",
            415: "It is packed otherwise than with gzip.",
            422: "It is no report, or holds what one may not. `errors` names where.",
        },
    ),
)
def take_reports(request: HttpRequest, attempt_id: int) -> HttpResponse:
    """Takes what trainers report: the bearer is the attempt's own token. A stream whose `first` is not what Vigil
    expects next is left alone, the others of the same post are taken; obey the answered numbers even when they are
    lower.
    """
    chunks = iter(lambda: request.read(65_536), b"")
    return _answer(
        attempt_id, request.headers.get("Authorization", ""), request.headers.get("Content-Encoding", ""), chunks
    )


def _answer(attempt_id: int, authorization: str, encoding: str, chunks: Iterable[bytes]) -> HttpResponse:
    try:
        answer = reports.receive(attempt_id, authorization, encoding, chunks)
    except Problem as problem:
        return problem.response()
    body = msgspec.json.encode({"streams": answer.streams, "version": answer.version})
    return HttpResponse(body, content_type="application/json")


class Intake:
    """Answers the shippers' posts, and hands everything else on."""

    def __init__(self, application: Application, *, threads: int | None = None) -> None:
        self.application = application
        # SQLite has one writer; on PostgreSQL attempts don't wait for each other.
        self.threads = threads or (1 if connection.vendor == "sqlite" else 4)
        self.pool: ThreadPoolExecutor | None = None
        self.waiting = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        match = PATH.fullmatch(scope["path"]) if scope["type"] == "http" and scope["method"] == "POST" else None
        if match is None:
            await self.application(scope, receive, send)
            return
        chunks = await _read(receive)
        if chunks is None:
            return  # the sender has gone
        if self.waiting >= WAITING:
            await _respond(send, problems.plain(503, {"Retry-After": "1"}))
            return
        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
        self.pool = self.pool or ThreadPoolExecutor(self.threads, "intake")
        self.waiting += 1
        try:
            response = await asyncio.get_running_loop().run_in_executor(
                self.pool,
                _answer_in_thread,
                int(match[1]),
                headers.get("authorization", ""),
                headers.get("content-encoding", ""),
                chunks,
            )
        finally:
            self.waiting -= 1
        await _respond(send, response)


def _answer_in_thread(attempt_id: int, authorization: str, encoding: str, chunks: list[bytes]) -> HttpResponse:
    """The answer, on a connection that lives as long as the thread; a broken one is replaced at the next post."""
    connection.close_if_unusable_or_obsolete()
    try:
        return _answer(attempt_id, authorization, encoding, chunks)
    except DatabaseError:
        reports.logger.exception("attempt %s: a report was not taken, its shipper will send it again", attempt_id)
        connection.close()
        return problems.plain(503, {"Retry-After": "2"})
    except Exception:
        reports.logger.exception("attempt %s: a report was not taken", attempt_id)
        return problems.plain(500)


async def _read(receive: Receive) -> list[bytes] | None:
    """The body, read no further than just over the limit; None if the sender went away."""
    chunks, size = [], 0
    while size <= wire.COMPRESSED_BYTES:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        chunk = message.get("body", b"")
        chunks.append(chunk)
        size += len(chunk)
        if not message.get("more_body"):
            break
    return chunks


async def _respond(send: Send, response: HttpResponse) -> None:
    headers = [(name.lower().encode(), value.encode()) for name, value in response.items()]
    headers.append((b"cache-control", problems.PRIVATE.encode()))
    headers.append((b"content-length", str(len(response.content)).encode()))
    if response.status_code == 413:
        headers.append((b"connection", b"close"))  # the rest of the body is not worth reading
    await send({"type": "http.response.start", "status": response.status_code, "headers": headers})
    await send({"type": "http.response.body", "body": response.content})
