"""Act as the client of a websocket: receive what a page or a script receives."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

from asgiref.sync import sync_to_async
from asgiref.testing import ApplicationCommunicator
from channels.db import database_sync_to_async
from django.db import connections
from django.test import Client

from console.asgi import application
from jobs import live
from jobs.intake import reports
from jobs.models import Attempt
from jobs.sockets import consumers
from portal import hub
from tests.jobs.reporting import post

ORIGIN = "http://127.0.0.1:8000"


class Socket(ApplicationCommunicator):
    """The client end of a websocket: a browser's, or (without a client) a script's."""

    def __init__(self, path: str, client: Client | None = None, **headers: str) -> None:
        payload = {"host": "127.0.0.1:8000"}
        if client:
            cookies = "; ".join(f"{name}={morsel.value}" for name, morsel in client.cookies.items())
            payload |= {"cookie": cookies, "origin": ORIGIN}
        payload |= headers
        path, _, query = path.partition("?")
        scope = {
            "type": "websocket",
            "path": path,
            "query_string": query.encode(),
            "headers": [(name.encode(), value.encode()) for name, value in payload.items()],
            "subprotocols": [],
        }
        super().__init__(application, scope)

    async def connect(self) -> int | None:
        """Connect; return None if accepted, or else the close code."""
        await self.send_input({"type": "websocket.connect"})
        answer = await self.receive_output(10)
        self.answered = dict(answer.get("headers", ()))
        return None if answer["type"] == "websocket.accept" else int(answer["code"])

    async def disconnect(self) -> None:
        await self.send_input({"type": "websocket.disconnect", "code": 1000})
        await self.wait(10)

    async def hear(self, kind: str = "", timeout: float = 10) -> Any:
        """Return the next JSON message of this kind, or the next frame's header with its columns."""
        while True:
            event = await self.receive_output(timeout)
            if event["type"] == "websocket.close":
                return event["code"]
            assert event["type"] == "websocket.send", event
            if event.get("bytes"):
                header, data = live.unpack(event["bytes"])
                if not kind:
                    columns = live.columns_of(header, data)
                    return header, [{k: v.tolist() for k, v in c.items()} for c in columns]
            elif (word := json.loads(event["text"]))["kind"] == kind:
                return word


def play(scene: Callable[[], Awaitable[None]]) -> None:
    async def whole() -> None:
        try:
            await scene()
        finally:
            await hub.hub_of_process("", consumers.relay_for).close()
            await database_sync_to_async(connections.close_all)()

    asyncio.run(whole())


async def take(attempt: Attempt, *cuts: Any) -> None:
    await sync_to_async(lambda: reports.ingest(attempt.pk, post(*cuts)))()
