"""Bounds on request bodies, kept before Django spools them: a body of 10 GB must not fill the disk."""

import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from portal.http.problems import PRIVATE

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]

MIB = 1024 * 1024
UPLOAD = 52 * MIB  # somebody's own code (50 MB packed) with its spec
ORDINARY = 2 * MIB
UPLOADS = ("/api/v1/jobs", "/api/v1/sweeps", "/submit")  # where code may be sent to


class _TooLarge(Exception):
    """The body outgrew its bound while it was read."""


class BodyLimit:
    """Wraps the ASGI application; answers 413 as soon as a body is, or says it will be, too large."""

    def __init__(self, application: Application) -> None:
        self.application = application

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.application(scope, receive, send)
            return
        limit = _limit(scope)
        if _declared(scope) > limit:
            await _refuse(send, limit)
            return
        started = False
        left = limit

        async def bounded() -> Message:
            nonlocal left
            message = await receive()
            left -= len(message.get("body", b""))
            if left < 0:
                raise _TooLarge
            return message

        async def noted(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            await self.application(scope, bounded, noted)
        except _TooLarge:
            if not started:
                await _refuse(send, limit)


def _limit(scope: Scope) -> int:
    upload = _header(scope, b"content-type").startswith(b"multipart/form-data")
    return UPLOAD if upload and scope["path"].startswith(UPLOADS) else ORDINARY


def _declared(scope: Scope) -> int:
    length = _header(scope, b"content-length")
    return int(length) if length.isdigit() and len(length) < 20 else 0


def _header(scope: Scope, name: bytes) -> bytes:
    return next((bytes(value) for key, value in scope["headers"] if key.lower() == name), b"")


async def _refuse(send: Send, limit: int) -> None:
    body = json.dumps(
        {
            "type": "urn:vigil:problem:too-large",
            "title": "Request Entity Too Large",
            "status": 413,
            "detail": f"The request is larger than {limit // MIB} MiB, the most that this address takes.",
            "errors": [],
        }
    ).encode()
    headers = [
        (b"content-type", b"application/problem+json"),
        (b"content-length", str(len(body)).encode()),
        (b"content-security-policy", b"default-src 'none'"),
        (b"cache-control", PRIVATE.encode()),
        (b"connection", b"close"),
    ]
    await send({"type": "http.response.start", "status": 413, "headers": headers})
    await send({"type": "http.response.body", "body": body})
