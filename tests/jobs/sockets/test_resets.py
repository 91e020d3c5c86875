"""Test clients that disconnect abruptly at any moment, on a real server: no error, no log, nothing left behind."""

from __future__ import annotations

import asyncio
import base64
import logging
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
import uvicorn

from console.asgi import application
from jobs.sockets import consumers
from portal import hub
from portal.models import Token, User
from tests.jobs.reporting import Spooled, attempt_of
from tests.jobs.sockets.listening import play, take
from tests.redis import Server

pytestmark = pytest.mark.django_db(transaction=True)
GREETING = b"hello"


class Raw:
    """A script's end of a websocket, byte by byte."""

    def __init__(self, port: int, path: str, secret: str) -> None:
        self.port = port
        key = base64.b64encode(bytes(16)).decode()
        self.request = (
            f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            f"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: {key}\r\nAuthorization: Bearer {secret}\r\n\r\n"
        ).encode()

    async def open(self, part: int | None = None) -> None:
        """Send the request, or so many bytes of it."""
        self.reader, self.writer = await asyncio.open_connection("127.0.0.1", self.port)
        self.writer.write(self.request[:part])
        await self.writer.drain()

    async def hear(self, what: bytes) -> None:
        await asyncio.wait_for(self.reader.readuntil(what), 10)

    async def send(self, raw: bytes) -> None:
        self.writer.write(raw)
        await self.writer.drain()

    def reset(self) -> None:
        """Leave at once: the other side gets an RST, and no goodbye of any kind."""
        linger = struct.pack("ii", 1, 0)
        self.writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        self.writer.transport.abort()


TEXT = b"\x81\x84\0\0\0\0" + b"word"  # a whole frame, masked with zeros


@asynccontextmanager
async def serving() -> AsyncIterator[uvicorn.Server]:
    config = uvicorn.Config(
        application,  # type: ignore[arg-type]
        port=0, ws="websockets-sansio", ws_per_message_deflate=False, lifespan="off", log_config=None,
    )  # fmt: skip
    web = uvicorn.Server(config)
    task = asyncio.create_task(web.serve())
    while not web.started:
        await asyncio.sleep(0.01)
    yield web
    web.should_exit = True
    await task


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.01)


def quiet(caplog: pytest.LogCaptureFixture) -> bool:
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == []
    return True


def nobody_listens() -> bool:
    return not hub.hub_of_process("", consumers.relay_for)._topics


Scene = Callable[[uvicorn.Server, Raw], Awaitable[None]]


def acted(path: str, secret: str, scene: Scene) -> None:
    """Play the scene with a raw socket to a real server, and check that nothing of the socket is left."""

    async def whole() -> None:
        async with serving() as web:
            await scene(web, Raw(web.servers[0].sockets[0].getsockname()[1], path, secret))
            await until(lambda: not web.server_state.connections and not web.server_state.tasks)
            assert nobody_listens()

    play(whole)


@pytest.fixture
def secret(ada: User) -> str:
    return Token.issue(ada, "script")[1]


@pytest.mark.parametrize("path", ["/ws/jobs/{}", "/ws/jobs/{}?format=json", "/ws/jobs", "/ws/jobs/999999", "/ws/no"])
@pytest.mark.parametrize("moment", ["request", "handshake", "accepted", "message"])
def test_a_peer_that_resets_is_no_fault(
    server: Server, secret: str, caplog: pytest.LogCaptureFixture, path: str, moment: str
) -> None:
    path = path.format(attempt_of().job_id)

    async def scene(web: uvicorn.Server, raw: Raw) -> None:
        await raw.open(40 if moment == "request" else None)
        if moment in {"accepted", "message"}:
            await raw.hear(b"\r\n\r\n")
        if moment == "message":
            await raw.send(TEXT[:7])
        raw.reset()

    acted(path, secret, scene)
    assert quiet(caplog)


@pytest.mark.parametrize("path", ["/ws/jobs/{}", "/ws/jobs"])
def test_a_peer_that_goes_while_it_is_let_in_leaves_nothing(
    server: Server, secret: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    """It has joined, and is gone when hello is sent to it."""
    path = path.format(attempt_of().job_id)
    joined, gone = asyncio.Event(), asyncio.Event()
    join = consumers.Socket.join

    async def slowly(self: Any, *args: Any, **options: Any) -> None:
        await join(self, *args, **options)
        joined.set()
        await gone.wait()

    monkeypatch.setattr(consumers.Socket, "join", slowly)

    async def scene(web: uvicorn.Server, raw: Raw) -> None:
        await raw.open()
        await asyncio.wait_for(joined.wait(), 10)
        raw.reset()
        await until(lambda: not web.server_state.connections)
        gone.set()

    acted(path, secret, scene)
    assert quiet(caplog)


@pytest.mark.parametrize("query", ["", "?format=json"])
def test_a_frame_for_a_peer_that_has_just_gone_is_no_fault(
    server: Server, secret: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, query: str
) -> None:
    """The connection is lost, and its consumer is busy with a message: what is published now has nobody to go to."""
    attempt = attempt_of()
    busy, free = asyncio.Event(), asyncio.Event()

    async def receive(self: Any, **message: Any) -> None:
        busy.set()
        await free.wait()

    monkeypatch.setattr(consumers.Socket, "receive", receive)

    async def scene(web: uvicorn.Server, raw: Raw) -> None:
        await raw.open()
        await raw.hear(GREETING)
        await raw.send(TEXT)
        await asyncio.wait_for(busy.wait(), 10)
        raw.reset()
        # Reading is paused while the message waits, so the server notices the disconnection only by writing.
        stream = Spooled()
        for step in range(200):
            if not web.server_state.connections:
                break
            await take(attempt, (stream.log(step, loss=1.0), step, step + 1))
        assert not web.server_state.connections
        await take(attempt, (stream.log(step + 1, loss=1.0), step + 1, step + 2))
        await asyncio.sleep(0.1)
        free.set()

    acted(f"/ws/jobs/{attempt.job_id}{query}", secret, scene)
    assert quiet(caplog)


def test_a_real_fault_of_a_socket_is_logged_and_closes_it(
    server: Server, secret: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This also holds for an error like that of a broken connection, but of another one than the peer's."""
    attempt = attempt_of()

    def broken(frame: bytes) -> str:
        raise ConnectionError("of something else")

    monkeypatch.setattr(consumers, "as_json", broken)

    async def scene(web: uvicorn.Server, raw: Raw) -> None:
        await raw.open()
        await raw.hear(GREETING)
        await take(attempt, Spooled().log(1, loss=1.0))
        await raw.hear(struct.pack("!BBH", 0x88, 2, consumers.GOING_AWAY))
        raw.reset()

    acted(f"/ws/jobs/{attempt.job_id}?format=json", secret, scene)
    assert "of something else" in caplog.text
