"""Test closing connections on which no request arrives or no answer is read, and no others."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import uvicorn
from uvicorn.server import ServerState
from websockets.asyncio.client import connect

from portal.http import connections
from portal.http.connections import PatientProtocol

WAIT_S = 0.2  # where something is to be closed
BLOCK = 8_192
PATIENT_S = 1.0  # where nothing is: longer than a busy machine pauses this process
POST = b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n"
GET = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "WAIT_S", WAIT_S)


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "WAIT_S", PATIENT_S)


class App:
    """Reads a request's body after `before_s`, answers its length after `after_s`, and echoes over sockets."""

    def __init__(self, before_s: float = 0, after_s: float = 0) -> None:
        self.before_s, self.after_s = before_s, after_s
        self.was_left = False

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "websocket":
            await receive()
            await send({"type": "websocket.accept"})
            text = await receive()
            await send({"type": "websocket.send", "text": text["text"]})
            return
        await asyncio.sleep(self.before_s)
        length, more = 0, True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                self.was_left = True
                return
            length, more = length + len(message["body"]), message.get("more_body")
        await asyncio.sleep(self.after_s)
        body = str(length).encode()
        head = [(b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": head})
        await send({"type": "http.response.body", "body": body})


Scene = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def play(app: Any, scene: Scene) -> None:
    async def whole() -> None:
        config = uvicorn.Config(app, ws="websockets-sansio", log_config=None, access_log=False)
        config.load()
        state = ServerState()
        loop = asyncio.get_running_loop()
        server = await loop.create_server(lambda: PatientProtocol(config, state, {}), "127.0.0.1", 0)
        async with server:
            reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
            await asyncio.wait_for(scene(reader, writer), 30)
            writer.close()

    asyncio.run(whole())


async def rest(reader: asyncio.StreamReader) -> bytes:
    """Read everything until the server closes."""
    try:
        return await asyncio.wait_for(reader.read(), 20)
    except ConnectionResetError:
        return b""


@pytest.mark.parametrize("begun", [b"", b"G", b"GET / HTTP/1.1\r\nhost: x\r\n", b"\r\n", POST[:-2] % 5])
def test_a_request_that_does_not_come(begun: bytes) -> None:
    async def scene(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(begun)
        assert await rest(reader) == b""

    play(App(), scene)


@pytest.mark.parametrize("begun", [b"\r\n", b"GET / HT"])
def test_a_second_request_that_does_not_come(begun: bytes) -> None:
    async def scene(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(GET)
        assert (await reader.readuntil(b"\r\n\r\n0")).startswith(b"HTTP/1.1 200")
        writer.write(begun)
        assert await rest(reader) == b""

    play(App(), scene)


def test_headers_that_drip_are_not_waited_for() -> None:
    async def scene(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        closed = asyncio.create_task(rest(reader))
        for letter in b"GET / HTTP/1.1\r\nx: " + b"y" * 1_000:
            writer.write(bytes([letter]))
            await asyncio.sleep(WAIT_S / 8)
            if closed.done():
                return
        raise AssertionError("it is still open")

    play(App(), scene)


@pytest.mark.parametrize("body", [b"", b"12"])
def test_a_body_that_stops_is_answered_and_the_application_hears_of_it(body: bytes) -> None:
    app = App()

    async def scene(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(POST % 5 + body)
        assert (await rest(reader)).startswith(b"HTTP/1.1 408 ")

    play(app, scene)
    assert app.was_left


def test_a_body_that_drips_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "MIN_BYTES_S", 1_000)

    async def scene(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        closed = asyncio.create_task(rest(reader))
        writer.write(POST % 10_000)
        for _ in range(10_000):
            writer.write(b"x")
            await asyncio.sleep(WAIT_S / 8)
            if closed.done():
                # A byte sent after the server closed makes the kernel reset the connection, maybe before the answer is
                # read.
                assert closed.result()[:13] in (b"HTTP/1.1 408 ", b"")
                return
        raise AssertionError("The server still waits for the body.")

    play(App(), scene)


def test_a_slow_body_that_keeps_its_pace_is_taken(patient: None) -> None:
    async def scene(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(POST % 20_000)
        for _ in range(20):
            writer.write(b"x" * 1_000)
            await asyncio.sleep(PATIENT_S / 8)
        assert b"20000" in await reader.readuntil(b"\r\n\r\n20000")

    play(App(), scene)


@pytest.mark.parametrize(
    "delay", [{"before_s": 2 * PATIENT_S}, {"after_s": 2 * PATIENT_S}], ids=["reads late", "answers late"]
)
def test_while_the_application_is_slow_nobody_is_cut_off(patient: None, delay: dict[str, float]) -> None:
    async def scene(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(POST % 8_000_000 + b"x" * 8_000_000)
        assert b"8000000" in await reader.readuntil(b"\r\n\r\n8000000")

    play(App(**delay), scene)


@pytest.mark.parametrize(
    "head",
    [
        b"GET /" + b"a" * 1_000_000,
        b"GET / HTTP/1.1\r\nx: " + b"y" * 1_000_000,
        b"GET / HTTP/1.1\r\n" + b"x: y\r\n" * 100_000,
        b"POST / HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n1\r\nx\r\n0\r\nx: " + b"y" * 1_000_000,
    ],
    ids=["address", "header", "headers", "trailer"],
)
def test_a_head_without_end_is_refused(head: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "WAIT_S", 60)

    async def scene(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        answer = asyncio.create_task(reader.read(100))
        for start in range(0, len(head), BLOCK):  # what is on its way once it has answered resets the connection
            writer.write(head[start : start + BLOCK])
            await asyncio.wait({answer}, timeout=0.01)
            if answer.done():
                break
        assert (await answer).startswith(b"HTTP/1.1 431 ")

    play(App(), scene)


def test_a_body_in_chunks_of_a_byte_is_taken(patient: None) -> None:
    async def scene(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n")
        writer.write(b"1\r\nx\r\n" * 50_000 + b"0\r\n\r\n")
        assert b"50000" in await reader.readuntil(b"\r\n\r\n50000")

    play(App(), scene)


async def pour(scope: Any, receive: Any, send: Any) -> None:
    """Answer 20 MB."""
    await send({"type": "http.response.start", "status": 200, "headers": []})
    for left in range(20, 0, -1):
        await send({"type": "http.response.body", "body": b"x" * 1_000_000, "more_body": left > 1})


def test_an_answer_that_is_not_read_is_given_up() -> None:
    async def scene(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        writer.write(GET)
        await asyncio.sleep(4 * WAIT_S)
        writer.transport.resume_reading()  # type: ignore[attr-defined]
        assert len(await rest(reader)) < 20_000_000

    play(pour, scene)


def test_who_goes_away_amid_pipelined_requests_is_no_error(caplog: pytest.LogCaptureFixture) -> None:
    app = App(after_s=WAIT_S / 2)

    async def scene(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(GET * 20)
        await reader.readuntil(b"200")
        writer.transport.abort()
        await asyncio.sleep(2 * WAIT_S)

    play(app, scene)
    assert not caplog.records


def test_an_answer_that_is_read_slowly_is_sent_whole(patient: None) -> None:
    async def scene(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(GET.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n"))
        length = 0
        while piece := await reader.read(600_000):
            length += len(piece)
            await asyncio.sleep(PATIENT_S / 16)
        assert length > 20_000_000

    play(pour, scene)


def test_sockets_stay_open() -> None:
    async def scene(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        host, port = writer.get_extra_info("peername")
        async with connect(f"ws://{host}:{port}/") as socket:
            await asyncio.sleep(3 * WAIT_S)
            await socket.send("still there")
            assert await socket.recv() == "still there"

    play(App(), scene)
