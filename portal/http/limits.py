"""Enforce limits on request bodies before Django spools them: a body of 10 GB must not fill the disk.

A body larger than a form is read only from authenticated senders: 300 anonymous posts of 1 MB took 290 MB.
"""

from collections import Counter
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from channels.db import database_sync_to_async
from django.contrib.auth.views import redirect_to_login
from django.http import HttpResponse

from portal import database
from portal.http import problems, senders
from portal.http.problems import Problem

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]

MIB = 1024 * 1024
UPLOAD = 52 * MIB  # a user's own code (50 MB packed) with its spec
ORDINARY = 2 * MIB
ANONYMOUS = 16 * 1024  # the sign-in form, an enrolment, a Slurm hook: none exceeds 1 kB
MAX_LARGE_REQUESTS = 16  # per person, in one web process: 2 MiB each in memory, uploads on disk
UPLOADS = ("/api/v1/jobs", "/api/v1/sweeps", "/submit")  # where code may be uploaded


class _Refused(Exception):
    """Raised to stop reading the body; `response` gives the reason."""

    def __init__(self, response: HttpResponse) -> None:
        super().__init__(response.status_code)
        self.response = response


class BodyLimit:
    """An ASGI wrapper that answers 413 as soon as a body is too large, or declares that it will be.

    An anonymous sender of more than a form gets 401 or the sign-in form; a person who sends many large bodies at once
    gets 429.
    """

    def __init__(self, application: Application) -> None:
        self.application = application
        self.large: Counter[int] = Counter()  # requests larger than a form in progress, by person

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.application(scope, receive, send)
            return
        body, started = _Body(scope, receive, self.large), False

        async def noted(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            await body.admit(declared_length(scope))
            await self.application(scope, body.receive, noted)
        except _Refused as refused:
            if not started:
                await respond(send, refused.response)
        except database.ERRORS:
            if started:
                raise
            await respond(send, problems.plain(503, {"Retry-After": str(database.RETRY_AFTER_S)}))
        finally:
            body.close()


class _Body:
    """The body of a request while it arrives."""

    def __init__(self, scope: Scope, receive: Receive, large: Counter[int]) -> None:
        self.scope, self._receive, self._large = scope, receive, large
        self.limit, self.received = _limit(scope), 0
        self.sender: int | None = None  # set only for large bodies

    async def receive(self) -> Message:
        message = await self._receive()
        self.received += len(message.get("body", b""))
        await self.admit(self.received)
        return message

    async def admit(self, length: int) -> None:
        """Raise _Refused unless a body of this length is accepted from its sender."""
        if length > self.limit:
            raise _Refused(_too_large(self.limit))
        if length <= ANONYMOUS or self.sender is not None:
            return
        sender = await _writer_of(self.scope)
        if sender is None:
            raise _Refused(_stranger(self.scope))
        if self._large[sender] >= MAX_LARGE_REQUESTS:
            raise _Refused(problems.plain(429, {"Retry-After": "1"}))
        self._large[sender] += 1
        self.sender = sender

    def close(self) -> None:
        if self.sender is not None:
            self._large[self.sender] -= 1
            if not self._large[self.sender]:
                del self._large[self.sender]


def declared_length(scope: Scope) -> int:
    """Return the Content-Length; 0 if there is none."""
    length = header(scope, b"content-length")
    return int(length) if length.isdigit() and len(length) < 20 else 0


def header(scope: Scope, name: bytes) -> bytes:
    return next((bytes(value) for key, value in scope["headers"] if key.lower() == name), b"")


async def respond(send: Send, response: HttpResponse) -> None:
    """Send a response made outside of Django's middleware; after a refusal the rest of the body is not read."""
    headers = [(name.lower().encode(), value.encode("latin-1")) for name, value in response.items()]
    headers.append((b"cache-control", problems.PRIVATE.encode()))
    headers.append((b"content-length", str(len(response.content)).encode()))
    if response.status_code in {302, 401, 413, 429}:
        headers.append((b"connection", b"close"))
    await send({"type": "http.response.start", "status": response.status_code, "headers": headers})
    await send({"type": "http.response.body", "body": response.content})


def _limit(scope: Scope) -> int:
    upload = header(scope, b"content-type").startswith(b"multipart/form-data")
    return UPLOAD if upload and scope["path"].startswith(UPLOADS) else ORDINARY


def _too_large(limit: int) -> HttpResponse:
    text = f"The request is larger than {limit // MIB} MiB, the limit of this address."
    return Problem(413, text, kind="too-large", headers={"Content-Security-Policy": "default-src 'none'"}).response()


async def _writer_of(scope: Scope) -> int | None:
    authorization, cookies = header(scope, b"authorization"), header(scope, b"cookie")
    found: int | None = await database_sync_to_async(senders.writer_of)(
        authorization.decode("latin-1"), cookies.decode("latin-1")
    )
    return found


def _stranger(scope: Scope) -> HttpResponse:
    if scope["path"].startswith("/api/"):
        return problems.unauthorized("You are not signed in, or the token is read-only or invalid.").response()
    return redirect_to_login(scope["path"])
