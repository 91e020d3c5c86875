"""Fan-out: deliveries per CPU-second of the server process at 500 sockets and 4 KB messages.

    python -m bench.hub

Three servers in turns, each one uvloop process on this machine, all sending the same bytes without deflate:
- ours: the portal itself, its sockets with their tokens, its hub, messages through Redis as reports publish them;
- channels_redis: a Channels consumer in a group, `group_send` through the core layer (its own virtual environment);
- bare: `websockets.broadcast` over 500 connections and nothing else.
Messages are paced below saturation, so that none is dropped; only the server's CPU time counts, and every delivery is
counted where it arrives. Bars: ≥ 15 × channels_redis, ≥ 40 % of bare.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from bench import stage

SOCKETS = 500
BYTES = 4_096
ROUNDS = 3
# (messages, seconds between two of them): channels_redis needs a fifth of a second for one message to 500 sockets.
PACE = {"ours": (150, 0.05), "bare": (150, 0.05), "channels": (12, 0.75)}
CHANNELS = ("channels-redis==4.3.0", "channels", "uvicorn", "websockets", "uvloop", "httptools", "redis")
GROUP = "bench"


def main() -> int:
    print(stage.machine())
    found: dict[str, list[float]] = {name: [] for name in PACE}
    with stage.site() as place:
        for _ in range(ROUNDS):
            for name in PACE:
                found[name].append(asyncio.run(_round(name, place)))
    print(f"deliveries per CPU-second of the server, {SOCKETS} sockets, {BYTES} B")
    for name, row in found.items():
        print(f"  {name:10}" + " ".join(f"{value:>10,.0f}" for value in row))
    to_channels = [a / b for a, b in zip(found["ours"], found["channels"], strict=True)]
    to_bare = [a / b for a, b in zip(found["ours"], found["bare"], strict=True)]
    print("  × channels" + " ".join(f"{value:10.1f}" for value in to_channels))
    print("  of bare   " + " ".join(f"{value:10.2f}" for value in to_bare))
    bars = {
        "channels": stage.bar("times channels_redis", statistics.median(to_channels), 15),
        "bare": stage.bar("share of websockets.broadcast", statistics.median(to_bare), 0.4),
    }
    return stage.result(
        "hub",
        bars=bars,
        deliveries_per_cpu_second=statistics.median(found["ours"]),
        times_channels_redis=statistics.median(to_channels),
        share_of_broadcast=statistics.median(to_bare),
    )


async def _round(name: str, place: stage.Site) -> float:
    """Deliveries per CPU-second of one server, from its start to its end."""
    server = {"ours": _ours, "channels": _channels, "bare": _bare}[name]
    messages, pause = PACE[name]
    async with server(place) as (port, pid, path, headers):
        arrived = _Arrivals()
        # A few at once: they all authenticate.
        for at in range(0, SOCKETS, 50):
            await asyncio.gather(*(arrived.connect(port, path, headers) for _ in range(at, at + 50)))
        await _settled(arrived)
        await _publish(port, 1, 0)  # the path is warm, and a listener that is not there yet would show
        await arrived.count(SOCKETS)
        before, cpu = arrived.messages, stage.cpu_seconds(pid)
        await _publish(port, messages, pause)
        await arrived.count(before + messages * SOCKETS)
        return messages * SOCKETS / (stage.cpu_seconds(pid) - cpu)


class _Arrivals:
    """500 clients that count binary messages of our size, with as little work as possible."""

    def __init__(self) -> None:
        self.bytes = 0

    @property
    def messages(self) -> int:
        return self.bytes // (BYTES + 4)  # a frame's head: two bytes and a length of two

    async def connect(self, port: int, path: str, headers: str) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 20)
        writer.write(_handshake(port, path, headers))
        head = await reader.readuntil(b"\r\n\r\n")
        if b" 101 " not in head[:15]:
            raise SystemExit(f"no socket: {head!r}")
        task = asyncio.create_task(self._read(reader))
        task.add_done_callback(lambda _: writer.close())
        _tasks.add(task)

    async def _read(self, reader: asyncio.StreamReader) -> None:
        """Count our messages; the few short texts (hello, heartbeats) are passed over."""
        while True:
            head = await reader.readexactly(2)
            length = head[1]
            if length == 126:
                length = int.from_bytes(await reader.readexactly(2), "big")
            await reader.readexactly(length)
            if head[0] == 0x82 and length == BYTES:
                self.bytes += BYTES + 4

    async def count(self, wanted: int, timeout_s: float = 120.0) -> None:
        async with asyncio.timeout(timeout_s):
            while self.messages < wanted:
                await asyncio.sleep(0.02)


_tasks: set[asyncio.Task[None]] = set()


async def _settled(arrived: _Arrivals) -> None:
    """Wait until nothing more arrives as a consequence of joining."""
    before = -1
    while before != arrived.bytes:
        before = arrived.bytes
        await asyncio.sleep(0.5)


async def _publish(port: int, messages: int, pause: float) -> None:
    """Have the server's own process publish so many messages, so far apart: a socket whose path says so."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(_handshake(port, f"/publish/{messages}/{pause}"))
    await reader.read()  # until the server has done and closes it
    writer.close()


def _handshake(port: int, path: str, headers: str = "") -> bytes:
    return (
        f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        f"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n{headers}\r\n"
    ).encode()


@asynccontextmanager
async def _ours(place: stage.Site) -> AsyncIterator[tuple[int, int, str, str]]:
    token, job = _prepare(place)
    with place.web("bench.hub:portal_application", BENCH_JOB=str(job)) as (port, pid):
        yield port, pid, f"/ws/jobs/{job}", f"Authorization: Bearer {token}\r\n"


@asynccontextmanager
async def _channels(place: stage.Site) -> AsyncIterator[tuple[int, int, str, str]]:
    python, port, log = stage.others("channels_redis", *CHANNELS), stage.free_port(), place.home / "channels.log"
    command = [
        python, "-m", "uvicorn", "bench.hub_rival:application", "--host", "127.0.0.1", "--port", port, *stage.UVICORN,
    ]  # fmt: skip
    with stage.process(command, log, environment=place.environment) as child:
        stage.wait_for_port(port, child, log)
        yield port, child.pid, "/listen", ""


@asynccontextmanager
async def _bare(place: stage.Site) -> AsyncIterator[tuple[int, int, str, str]]:
    port, log = stage.free_port(), place.home / "bare.log"
    with stage.process([sys.executable, "-m", "bench.hub", "--bare", port], log) as child:
        stage.wait_for_port(port, child, log)
        yield port, child.pid, "/listen", ""


def _prepare(place: stage.Site) -> tuple[str, int]:
    """A person's token and a job, in a process of the site."""
    found = stage.in_child("bench.hub", "--prepare", json.dumps(place.environment))
    return found["token"], found["job"]


def prepare(environment: dict[str, str]) -> None:
    stage.django(stage.Site(Path(environment["VIGIL_HOME"]), environment))
    from portal.models import Token, User
    from tests.jobs.reporting import attempt_of, job_of

    job = attempt_of(job_of()).job
    User.objects.filter(pk=job.owner_id).update(is_superuser=True)
    print(json.dumps({"token": Token.issue(job.owner, "bench")[1], "job": job.pk}))


def message() -> bytes:
    """A frame of 4 KB, as an intake publishes it."""
    import numpy as np

    from jobs import live

    entry = {"name": "loss", "kind": "value", "rank": 0, "incarnation": 0, "n": 320}
    about: dict[str, Any] = {
        "attempt": 1, "number": 1, "version": 1, "state": "running", "step": 1, "series": [entry], "events": [],
    }  # fmt: skip
    frame = live.pack(about, np.arange(320.0), np.arange(320, dtype="<f4"))
    about["phase"] = "x" * (BYTES - len(frame) - 12)
    while len(frame := live.pack(about, np.arange(320.0), np.arange(320, dtype="<f4"))) > BYTES:
        about["phase"] = about["phase"][:-1]
    assert len(frame) == BYTES
    return len(frame).to_bytes(4, "little") + frame


async def portal_application(scope: Any, receive: Any, send: Any) -> None:
    """The portal, and one address that publishes as intakes do, from this very process."""
    from console.asgi import application

    if scope["type"] == "websocket" and scope["path"].startswith("/publish/"):
        from jobs import live
        from portal.publish import publish

        *_, messages, pause = scope["path"].split("/")
        topic, sent = live.job_topic(int(os.environ["BENCH_JOB"])), message()
        for _ in range(int(messages)):
            await asyncio.to_thread(publish, {topic: sent})
            await asyncio.sleep(float(pause))
        await send({"type": "websocket.close"})
        return
    await application(scope, receive, send)


def bare(port: int) -> None:
    """`websockets.broadcast`, and nothing else."""
    import uvloop
    from websockets.asyncio.server import ServerConnection, broadcast, serve

    listeners: set[ServerConnection] = set()
    sent = os.urandom(BYTES)

    async def handle(connection: ServerConnection) -> None:
        path = connection.request.path if connection.request else ""
        if path == "/listen":
            listeners.add(connection)
            await connection.wait_closed()
            return
        messages, pause = path.strip("/").split("/")[-2:]
        for _ in range(int(messages)):
            broadcast(listeners, sent)
            await asyncio.sleep(float(pause))

    async def run() -> None:
        async with serve(handle, "127.0.0.1", port, compression=None):
            await asyncio.Future()

    uvloop.run(run())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bare", type=int)
    parser.add_argument("--prepare")
    options = parser.parse_args()
    if options.bare:
        bare(options.bare)
    elif options.prepare:
        prepare(json.loads(options.prepare))
    else:
        sys.exit(main())
