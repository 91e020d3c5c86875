"""Test the hub with a real Redis: nothing lost between subscribing and reading, slow listeners, an outage of Redis."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from redis.asyncio.client import PubSub
from websockets.asyncio.client import connect
from websockets.frames import Frame, Opcode
from websockets.protocol import Protocol, Side, State

from portal.http.sockets import writer_of
from portal.hub import QUEUE, Hub, Item, PassThrough, frame
from tests.redis import Server, redis_up


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    with redis_up(tmp_path / "redis") as server:
        yield server


class Ear:
    """A listener that notes what it is sent; `hold` makes it slow."""

    def __init__(self) -> None:
        self.heard: asyncio.Queue[bytes | None] = asyncio.Queue()
        self.go_on = asyncio.Event()
        self.go_on.set()

    async def send(self, message: bytes | None) -> None:
        await self.go_on.wait()
        self.heard.put_nowait(message)

    async def get(self) -> bytes | None:
        return await self.heard.get()


async def join(hub: Hub, topic: str, audience: str = "") -> Ear:
    ear = Ear()
    await hub.join(topic, ear.send, audience=audience)
    return ear


def run(server: Server, scene: Callable[[Hub], Awaitable[None]], **options: object) -> None:
    async def play() -> None:
        hub = Hub(server.url, **options)  # type: ignore[arg-type]
        try:
            await asyncio.wait_for(scene(hub), 30)
        finally:
            await hub.close()

    asyncio.run(play())


def test_who_has_joined_misses_nothing(server: Server) -> None:
    async def scene(hub: Hub) -> None:
        for i in range(20):  # again and again: the first message may come right after joining
            ear = Ear()
            listener = await hub.join(f"topic-{i % 3}", ear.send)
            await asyncio.to_thread(server.publish, f"topic-{i % 3}", b"%d" % i)
            assert await ear.get() == b"%d" % i
            await hub.leave(listener)

    run(server, scene)


def test_every_listener_of_the_topic_hears_and_no_other(server: Server) -> None:
    async def scene(hub: Hub) -> None:
        first, second, other = await join(hub, "a"), await join(hub, "a"), await join(hub, "b")
        await asyncio.to_thread(server.publish, "a", b"1", b"2")
        await asyncio.to_thread(server.publish, "b", b"3")
        assert [await first.get(), await first.get()] == [b"1", b"2"]
        assert [await second.get(), await second.get()] == [b"1", b"2"]
        assert await other.get() == b"3"

    run(server, scene)


def test_a_slow_listener_learns_of_its_gap_and_does_not_slow_others(server: Server) -> None:
    async def scene(hub: Hub) -> None:
        slow, quick = await join(hub, "a"), await join(hub, "a")
        slow.go_on.clear()
        total = QUEUE + 10
        publishing = asyncio.create_task(asyncio.to_thread(server.publish, "a", *(b"%d" % i for i in range(total))))
        assert [await quick.get() for _ in range(total)] == [b"%d" % i for i in range(total)]
        await publishing
        slow.go_on.set()
        # The first was on its way already; the queue behind it overflowed at the last but eight.
        assert await slow.get() == b"0"
        assert await slow.get() is None
        assert [await slow.get() for _ in range(8)] == [b"%d" % i for i in range(total - 8, total)]

    run(server, scene)


def test_after_an_outage_of_redis_listeners_learn_of_the_gap_and_receive_again(server: Server) -> None:
    async def scene(hub: Hub) -> None:
        listener = await join(hub, "a")
        await asyncio.to_thread(server.kill)
        await asyncio.to_thread(server.start)
        assert await listener.get() is None
        # Only then is it subscribed again: a message arrives at the first try.
        await asyncio.to_thread(server.publish, "a", b"back")
        assert await listener.get() == b"back"

    run(server, scene)


def test_no_error_ends_the_reading(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the client library makes of an answer: one process without live updates would look like a quiet lab."""
    read, faults = PubSub.get_message, [ValueError("not what a parser should raise")]

    async def get_message(*arguments: Any, **options: Any) -> Any:
        if faults:
            raise faults.pop()
        return await read(*arguments, **options)

    async def scene(hub: Hub) -> None:
        listener = await join(hub, "a")
        assert await listener.get() is None
        await asyncio.to_thread(server.publish, "a", b"back")
        assert await listener.get() == b"back"

    monkeypatch.setattr(PubSub, "get_message", get_message)
    run(server, scene)


@pytest.mark.lengthy
def test_joining_without_redis_does_not_fail(server: Server) -> None:
    server.kill()

    async def scene(hub: Hub) -> None:
        listener = await join(hub, "a")
        await asyncio.to_thread(server.start)
        assert await listener.get() is None

    run(server, scene)


@pytest.mark.parametrize("fault", [RuntimeError, asyncio.CancelledError])
def test_who_could_not_join_leaves_nothing_behind(server: Server, fault: type[BaseException]) -> None:
    class Closed(PassThrough):
        """A relay that never opens: its database is away, or whoever joins is no longer wanted."""

        async def open(self) -> None:
            raise fault

    async def scene(hub: Hub) -> None:
        with pytest.raises(fault):
            await join(hub, "a")
        assert not hub._topics

    run(server, scene, relay=lambda topic: Closed())


class Shout:
    """A relay that sends each message in capitals, and the original to the audience `quiet`."""

    async def open(self) -> None:
        self.opened = True

    def feed(self, message: bytes, audiences: set[str]) -> Iterable[Item]:
        if message == b"bad":
            raise ValueError("bad")
        yield "", message.upper()
        for audience in audiences - {""}:
            yield audience, message

    def tick(self) -> Iterable[Item]:
        yield "", b"TICK"


def test_a_relay_makes_of_messages_what_its_audiences_get(server: Server) -> None:
    async def scene(hub: Hub) -> None:
        plain, quiet = await join(hub, "a"), await join(hub, "a", "quiet")
        await asyncio.to_thread(server.publish, "a", b"bad", b"word")  # an unreadable message harms no other
        received = [message for message in [await quiet.get() for _ in range(2)] if message != b"TICK"]
        assert received[:1] == [b"WORD"]
        assert await plain.get() in {b"WORD", b"TICK"}

    run(server, scene, relay=lambda topic: Shout())


@pytest.mark.parametrize("length", [0, 1, 125, 126, 65_535, 65_536, 200_000])
def test_a_frame_is_what_a_websocket_expects(length: int) -> None:
    message = bytes(i % 251 for i in range(length))
    peer = Protocol(Side.CLIENT, state=State.OPEN, max_size=None)
    peer.receive_data(frame(message))
    (event,) = peer.events_received()
    assert isinstance(event, Frame)
    assert (event.opcode, event.fin, bytes(event.data)) == (Opcode.BINARY, True, message)


@pytest.mark.slow
def test_on_a_real_server_a_reader_that_stalls_loses_and_nobody_else(server: Server) -> None:
    """Frames written past uvicorn's `send` respect what the peer's side can take."""
    total, message = 1_000, bytes(65_536)  # more than its queue and the largest buffers of two sockets take

    async def scene(hub: Hub) -> None:
        joined = asyncio.Semaphore(0)

        async def application(scope: Any, receive: Any, send: Any) -> None:
            if scope["type"] != "websocket":
                return
            await receive()
            await send({"type": "websocket.accept"})

            async def pass_on(message: bytes | None) -> None:
                await send({"type": "websocket.send", **({"bytes": message} if message else {"text": "missed"})})

            write = writer_of(send)
            assert write is not None
            listener = await hub.join("a", pass_on, write=write)
            joined.release()
            while (await receive())["type"] != "websocket.disconnect":
                pass
            await hub.leave(listener)

        config = uvicorn.Config(
            application, port=0, ws="websockets-sansio", ws_per_message_deflate=False, lifespan="off", log_level="error"
        )
        web = uvicorn.Server(config)
        serving = asyncio.create_task(web.serve())
        while not web.started:
            await asyncio.sleep(0.01)
        address = f"ws://127.0.0.1:{web.servers[0].sockets[0].getsockname()[1]}"
        async with (
            connect(address, max_queue=1, close_timeout=0.2) as stalled,
            connect(address, compression=None) as quick,
        ):
            for _ in range(2):  # who has not joined yet hears nothing
                await joined.acquire()
            for _ in range(total // 20):  # the next few only once the one who reads has these
                await asyncio.to_thread(server.publish, "a", *[message] * 20)
                for _ in range(20):
                    assert len(await quick.recv()) == len(message)
            got = [await stalled.recv()]
            while got[-1] != "missed":
                got.append(await stalled.recv())
            assert len(got) < total
        web.should_exit = True
        await serving

    run(server, scene)
