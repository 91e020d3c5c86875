"""Authenticate every websocket: check which page opens it, and for whom."""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from channels.auth import AuthMiddlewareStack
from channels.db import database_sync_to_async
from django.conf import settings
from django.contrib.auth.models import AnonymousUser
from django.http.request import split_domain_port, validate_host
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

from portal import database
from portal.http import problems
from portal.http.problems import PRIVATE
from portal.http.senders import user_of_session, user_of_token
from portal.models import User, digest

logger = logging.getLogger(__name__)

TRY_AGAIN_LATER = 1013

Scope = MutableMapping[str, Any]
Send = Callable[[Any], Awaitable[None]]
Application = Callable[[Scope, Callable[[], Awaitable[Any]], Send], Awaitable[None]]


TOO_MANY = 4429


class SocketLimits:
    """Count the sockets that each person and each token has open in this web process (VIGIL_SOCKETS).

    A token may use half of its owner's limit, so that a script that leaks sockets leaves some for the owner's pages.
    """

    def __init__(self) -> None:
        self.taken: Counter[tuple[str, object]] = Counter()

    def take(self, scope: Scope) -> str:
        """Count this socket; return "" or the reason why it exceeds a limit."""
        most = settings.VIGIL_SOCKETS
        for key, limit in _limits(scope, most).items():
            if self.taken[key] >= limit:
                holder = "this token has" if key[0] == "token" else "you have"
                return f"Too many sockets: {holder} {limit} open, which is the limit. Close some."
        self.taken.update(_limits(scope, most).keys())
        return ""

    def give_back(self, scope: Scope) -> None:
        for key in _limits(scope, 0):
            self.taken[key] -= 1
            if not self.taken[key]:
                del self.taken[key]


def _limits(scope: Scope, most: int) -> dict[tuple[str, object], int]:
    """Return the counters that a socket belongs to, with the limit of each."""
    found: dict[tuple[str, object], int] = {("person", scope["user"].pk): most}
    return {("token", scope["token"]): max(1, most // 2), **found} if "token" in scope else found


class Gone(ConnectionError):
    """Raised when the socket's other end is gone or has been closed: no error, and nothing left to send."""


class SocketGate:
    """Refuse (403, before anything is accepted) pages of other sites, and cookies sent without an origin.

    A browser always sends the origin of the page that opens a socket; a script sends none and must use a token, in its
    header: one in the query would end up in logs.
    """

    def __init__(self, application: Application) -> None:
        self.with_token = application
        self.with_session: Application = AuthMiddlewareStack(application)

    async def __call__(self, scope: Scope, receive: Any, send: Any) -> None:
        # The server's own `send`, bypassing Channels' session, which would inspect every outgoing frame.
        scope["send"], scope["write"] = frame_sender(send), writer_of(send)
        handshake = _Handshake(scope["send"])
        with contextlib.suppress(Gone):
            try:
                await self._open(scope, receive, handshake.send)
            except database.ERRORS as error:
                logger.warning("A socket of %s: the database did not answer: %s", scope["path"], error)
                await handshake.refuse_for_now(scope)

    async def _open(self, scope: Scope, receive: Any, send: Any) -> None:
        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
        origin, authorization = headers.get("origin"), headers.get("authorization")
        if not is_ours(origin, headers.get("host", "")) or (origin is None and authorization is None):
            await send({"type": "websocket.close", "code": 4403})
            return
        if authorization is None:
            await self.with_session(scope, receive, send)
            return
        scope["token"] = digest(authorization.partition(" ")[2])
        scope["user"] = await database_sync_to_async(user_of_token)(scope["token"])
        await self.with_token(scope, receive, send)


class _Handshake:
    """Send the response to a socket's handshake, marked as not cacheable like all responses."""

    def __init__(self, send: Send) -> None:
        self._send, self._is_accepted = send, False

    async def send(self, message: Any) -> None:
        if message["type"] == "websocket.accept":
            self._is_accepted = True
            message = {**message, "headers": [*message.get("headers", ()), (b"cache-control", PRIVATE.encode())]}
        await self._send(message)

    async def refuse_for_now(self, scope: Scope) -> None:
        """Refuse the handshake with 503 if the server supports it; close a socket that is already open."""
        if self._is_accepted or "websocket.http.response" not in scope.get("extensions", {}):
            await self._send({"type": "websocket.close", "code": TRY_AGAIN_LATER})
            return
        answer = problems.plain(503, {"Retry-After": str(database.RETRY_AFTER_S), "Cache-Control": PRIVATE})
        headers = [(name.lower().encode(), value.encode()) for name, value in answer.items()]
        await self._send({"type": "websocket.http.response.start", "status": 503, "headers": headers})
        await self._send({"type": "websocket.http.response.body", "body": answer.content})


def frame_sender(send: Send) -> Send:
    """Return a `send` that raises only Gone in all the cases where the server reports that the socket is closed."""
    protocol = _protocol_of(send)

    async def send_frame(message: Any) -> None:
        # After a peer's reset, until uvicorn notices it, asyncio accepts writes and logs warnings.
        if protocol is not None and protocol.handshake_complete and _is_over(protocol):
            raise Gone
        try:
            await send(message)
        except OSError as error:
            raise Gone from error
        except RuntimeError as error:
            if protocol is None or not _is_over(protocol):
                raise  # sent at the wrong time: our bug
            raise Gone from error

    return send_frame


def _protocol_of(send: Any) -> WebSocketsSansIOProtocol | None:
    protocol = getattr(send, "__self__", None)
    return protocol if isinstance(protocol, WebSocketsSansIOProtocol) else None


def _is_over(protocol: WebSocketsSansIOProtocol) -> bool:
    """Return whether nothing can be sent any more: either side has closed it, or the connection broke."""
    return protocol.close_sent or protocol.disconnected or protocol.transport.is_closing()


def writer_of(send: Any) -> Callable[[bytes], bool] | None:
    """Return a function that writes a finished frame directly; uvicorn's `send` would encode it again for each socket.

    The function returns False while the peer is slow to read or the socket is not open: then the frame must be sent
    with `send` and awaited. None under another server, or with compressed frames.
    """
    protocol = _protocol_of(send)
    if protocol is None or protocol.conn.extensions:
        return None

    def write(frame: bytes) -> bool:
        if not protocol.writable.is_set() or _is_over(protocol):
            return False
        protocol.transport.write(frame)
        return True

    return write


def is_ours(origin: str | None, host: str) -> bool:
    """Return whether a page of this origin may open a socket; scripts send no origin."""
    domain, _ = split_domain_port(host)
    if not domain or not validate_host(domain, settings.ALLOWED_HOSTS):
        return False
    if origin is None:
        return True
    return origin in settings.CSRF_TRUSTED_ORIGINS or origin.partition("://")[2] == host


def current_user(scope: Scope) -> User | AnonymousUser:
    """Return the person who owns this socket now: anonymous after sign-out, deactivation, or the token's end."""
    if "token" in scope:
        return user_of_token(scope["token"])
    # The scope holds the session as it was when the socket was opened.
    return user_of_session(scope["session"].session_key)
