"""Counting requests where they come in and go out: sockets aside, all of them, also those that never reach Django."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from portal import counted

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]


class Counted:
    """Wraps the ASGI application for HTTP."""

    def __init__(self, application: Application) -> None:
        self.application = application

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        status, began = 0, time.perf_counter()

        async def noted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self.application(scope, receive, noted)
        except Exception:
            counted.request(scope["method"], status or 500, time.perf_counter() - began)
            raise
        if status:  # else the sender has gone, and nobody was answered
            counted.request(scope["method"], status, time.perf_counter() - began)
