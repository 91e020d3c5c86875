"""The server of bench.hub that fans out with channels_redis, in a virtual environment of its own, without Vigil."""

from __future__ import annotations

import asyncio
import os
from typing import Any

import django
from django.conf import settings

if not settings.configured:
    layer = {"BACKEND": "channels_redis.core.RedisChannelLayer", "CONFIG": {"hosts": [os.environ["REDIS_URL"]]}}
    settings.configure(CHANNEL_LAYERS={"default": layer}, INSTALLED_APPS=["channels"], SECRET_KEY="bench")
    django.setup()

from channels.generic.websocket import AsyncWebsocketConsumer  # noqa: E402
from channels.layers import get_channel_layer  # noqa: E402

MESSAGE = os.urandom(4_096)
GROUP = "bench"


class RivalListener(AsyncWebsocketConsumer):
    async def connect(self) -> None:
        await self.channel_layer.group_add(GROUP, self.channel_name)
        await self.accept()

    async def frame(self, event: dict[str, Any]) -> None:
        await self.send(bytes_data=event["bytes"])


listener = RivalListener.as_asgi()


async def application(scope: Any, receive: Any, send: Any) -> None:
    if scope["type"] != "websocket":
        return
    if scope["path"] == "/listen":
        await listener(scope, receive, send)
        return
    *_, messages, pause = scope["path"].split("/")
    for _ in range(int(messages)):
        await get_channel_layer().group_send(GROUP, {"type": "frame", "bytes": MESSAGE})
        await asyncio.sleep(float(pause))
    await send({"type": "websocket.close"})
