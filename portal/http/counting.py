"""Count HTTP requests at the outermost layer, including those that never reach Django. Sockets are not counted."""

from __future__ import annotations

import time

from portal import process_counters
from portal.http.limits import Application, Message, Receive, Scope, Send


class RequestCounter:
    """An ASGI wrapper that counts HTTP requests."""

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
            process_counters.count_request(scope["method"], status or 500, time.perf_counter() - began)
            raise
        if status:  # else the client disconnected before a response
            process_counters.count_request(scope["method"], status, time.perf_counter() - began)
