"""Bounds on request bodies, kept before Django spools them: a body of 10 GB must not fill the disk.

A body of more than a form's size is read only of somebody who is known: 300 posts of 1 MB, sent by nobody in
particular, took 290 MB.
"""

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from channels.db import database_sync_to_async
from django.contrib.auth.views import redirect_to_login
from django.http import HttpResponse

from portal.http import problems, senders
from portal.http.problems import Problem

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]

MIB = 1024 * 1024
UPLOAD = 52 * MIB  # somebody's own code (50 MB packed) with its spec
ORDINARY = 2 * MIB
ANONYMOUS = 16 * 1024  # the form to sign in, an enrolment, a hook of Slurm's: none has more than 1 kB
UPLOADS = ("/api/v1/jobs", "/api/v1/sweeps", "/submit")  # where code may be sent to


class _TooLarge(Exception):
    """The body outgrew its bound while it was read."""


class _Unknown(Exception):
    """The body outgrew what is read of a stranger."""


class BodyLimit:
    """Wraps the ASGI application; answers 413 as soon as a body is, or says it will be, too large.

    Answers 401 (or, to a page's address, leads to the form to sign in) where more than a form comes from a stranger.
    """

    def __init__(self, application: Application) -> None:
        self.application = application

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.application(scope, receive, send)
            return
        limit = _limit(scope)
        declared = declared_length(scope)
        if declared > limit:
            await respond(send, _too_large(limit))
            return
        is_signed_in = False
        if declared > ANONYMOUS and not (is_signed_in := await _is_signed_in(scope)):
            await respond(send, _stranger(scope))
            return
        started = False
        received = 0

        async def bounded() -> Message:
            nonlocal received, is_signed_in
            message = await receive()
            received += len(message.get("body", b""))
            if received > limit:
                raise _TooLarge
            if received > ANONYMOUS and not is_signed_in and not (is_signed_in := await _is_signed_in(scope)):
                raise _Unknown
            return message

        async def noted(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            await self.application(scope, bounded, noted)
        except _TooLarge:
            if not started:
                await respond(send, _too_large(limit))
        except _Unknown:
            if not started:
                await respond(send, _stranger(scope))


def declared_length(scope: Scope) -> int:
    """Return the Content-Length; 0 where there is none."""
    length = header(scope, b"content-length")
    return int(length) if length.isdigit() and len(length) < 20 else 0


def header(scope: Scope, name: bytes) -> bytes:
    return next((bytes(value) for key, value in scope["headers"] if key.lower() == name), b"")


async def respond(send: Send, response: HttpResponse) -> None:
    """Send an answer that was made outside of Django's middleware; after a refusal the rest of the body is not read."""
    headers = [(name.lower().encode(), value.encode("latin-1")) for name, value in response.items()]
    headers.append((b"cache-control", problems.PRIVATE.encode()))
    headers.append((b"content-length", str(len(response.content)).encode()))
    if response.status_code in {302, 401, 413}:
        headers.append((b"connection", b"close"))
    await send({"type": "http.response.start", "status": response.status_code, "headers": headers})
    await send({"type": "http.response.body", "body": response.content})


def _limit(scope: Scope) -> int:
    upload = header(scope, b"content-type").startswith(b"multipart/form-data")
    return UPLOAD if upload and scope["path"].startswith(UPLOADS) else ORDINARY


def _too_large(limit: int) -> HttpResponse:
    text = f"The request is larger than {limit // MIB} MiB, the most that this address takes."
    return Problem(413, text, kind="too-large", headers={"Content-Security-Policy": "default-src 'none'"}).response()


async def _is_signed_in(scope: Scope) -> bool:
    authorization, cookies = header(scope, b"authorization"), header(scope, b"cookie")
    ask = database_sync_to_async(senders.is_signed_in)
    return bool(await ask(authorization.decode("latin-1"), cookies.decode("latin-1")))


def _stranger(scope: Scope) -> HttpResponse:
    if scope["path"].startswith("/api/"):
        return problems.unauthorized("Nobody is signed in, or the token is unknown, revoked or expired.").response()
    return redirect_to_login(scope["path"])
