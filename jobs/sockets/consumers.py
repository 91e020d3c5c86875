"""Serve the sockets of jobs: `/ws/jobs/<id>` follows one job, `/ws/jobs` all that a person can see."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable
from typing import Any
from urllib.parse import parse_qs

import msgspec
from channels.db import database_sync_to_async
from channels.generic.websocket import AsyncWebsocketConsumer
from django.conf import settings

from jobs import live
from jobs.intake.attempt_progress import json_float
from jobs.models import Attempt, Job
from jobs.sockets.relay import rank_audience, relay_for
from portal import hub
from portal.http import sockets
from portal.http.sockets import Gone
from portal.hub import Hub, Listener, Send
from portal.models import Project, User
from vigil_core.untrusted import whole

logger = logging.getLogger(__name__)

HEARTBEAT_S = 10.0
RECHECK_S = 30.0
LISTS_S = 1.0  # lists hear at most this often

NOT_SIGNED_IN, NOT_FOUND, GOING_AWAY = 4401, 4404, 1001
_places = sockets.SocketLimits()


def current_hub() -> Hub:
    return hub.hub_of_process(settings.REDIS_URL, relay_for)


class Socket(AsyncWebsocketConsumer):
    """The base of both sockets: tasks that live as long as the socket, and who it belongs to."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.listeners: dict[str, Listener] = {}
        self.tasks: list[asyncio.Task[None]] = []
        self.has_place = False

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Clean up however the socket ends: a peer may go in the middle of `begin`."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            if self.has_place:
                _places.give_back(self.scope)
            for task in self.tasks:
                task.cancel()
            for topic in list(self.listeners):
                await self.leave(topic)

    async def connect(self) -> None:
        user = self.scope["user"]
        # Accepted first, because a browser learns a close code only of a socket that was open.
        await self.accept()
        if not isinstance(user, User) or not user.is_active:
            await self.close(NOT_SIGNED_IN)
        elif refusal := _places.take(self.scope):
            await self.close(sockets.TOO_MANY, reason=refusal)
        else:
            self.has_place = True
            if not await self.begin(user):
                await self.close(NOT_FOUND)

    async def begin(self, user: User) -> bool:
        """Join what this socket follows and start its tasks. Return False if the person may see none of it."""
        raise NotImplementedError

    async def join(self, topic: str, send: Send, **options: Any) -> None:
        async def guarded(message: bytes | None) -> None:
            await self._guard(send(message))

        self.listeners[topic] = await current_hub().join(topic, guarded, **options)

    async def leave(self, topic: str) -> None:
        await current_hub().leave(self.listeners.pop(topic))

    def start(self, *loops: Any) -> None:
        self.tasks += [asyncio.create_task(self._guard(loop)) for loop in loops]

    async def _guard(self, work: Awaitable[None]) -> None:
        """Do some of the socket's work; end quietly if the peer has disconnected.

        Any other error closes the socket, because one that is no longer rechecked must not go on sending.
        """
        try:
            await work
        except Gone:
            return
        except Exception:
            logger.exception("A socket of %s is closed", self.scope.get("path"))
            with contextlib.suppress(Gone):
                await self.close(GOING_AWAY)

    async def send_json(self, **words: Any) -> None:
        await self.send(text_data=msgspec.json.encode(words).decode())

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            await self.send_json(kind="heartbeat")

    async def receive(self, text_data: str | None = None, bytes_data: bytes | None = None) -> None:
        """Ignore whatever a page sends: sockets only publish."""


class JobSocket(Socket):
    """The socket of a job: binary frames (jobs.live), or JSON with `?format=json`; `?rank=7` adds that rank's points.

    Apart from frames there are JSON texts: `hello` once the socket has joined (read history now: whatever is newer will
    come), `heartbeat` every 10 s with the version, and `missed` if this reader was too slow and must read again.
    """

    async def begin(self, user: User) -> bool:
        self.job_id = int(self.scope["url_route"]["kwargs"]["job_id"])
        query = parse_qs(self.scope["query_string"].decode("latin-1"))
        self.as_json = query.get("format") == ["json"]
        rank = whole(query.get("rank", [""])[0])
        if self.job_id >= 2**63 or not await self._may_see():
            return False
        # Joined before the version is read, so that nothing falls between the two.
        audience = rank_audience(rank) if rank else ""
        write = None if self.as_json else self.scope["write"]
        await self.join(live.job_topic(self.job_id), self._pass_on, audience=audience, write=write)
        await self.send_json(kind="hello", **(await shared_header(self.job_id)))
        self.start(self._beat(), self._recheck())
        return True

    async def _pass_on(self, frame: bytes | None) -> None:
        if frame is None:
            await self.send_json(kind="missed")
        elif self.as_json:
            await self.send(text_data=as_json(frame))
        else:
            await self.scope["send"]({"type": "websocket.send", "bytes": frame})

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            await self.send_json(kind="heartbeat", **(await shared_header(self.job_id)))

    async def _recheck(self) -> None:
        while True:
            await asyncio.sleep(RECHECK_S)
            if not await self._may_see():
                await self.close(NOT_FOUND)
                return

    @database_sync_to_async
    def _may_see(self) -> bool:
        user = sockets.current_user(self.scope)
        return isinstance(user, User) and Job.objects.visible_to(user).filter(pk=self.job_id).exists()


class JobsSocket(Socket):
    """The socket of the person's jobs: `{"kind": "jobs", "jobs": […]}`, the newest line of each, once a second."""

    async def begin(self, user: User) -> bool:
        self.lines: dict[int, bytes] = {}
        await self._follow(await self._projects() or set())
        await self.send_json(kind="hello")
        self.start(self._send_lines(), self._beat(), self._recheck())
        return True

    async def _follow(self, projects: set[int]) -> None:
        wanted = {live.project_topic(project) for project in projects}
        for topic in self.listeners.keys() - wanted:
            await self.leave(topic)
        for topic in wanted - self.listeners.keys():
            await self.join(topic, self._collect)

    async def _collect(self, line: bytes | None) -> None:
        if line is None:
            await self.send_json(kind="missed")
        else:
            self.lines[msgspec.json.decode(line)["job"]] = line

    async def _send_lines(self) -> None:
        while True:
            await asyncio.sleep(LISTS_S)
            if self.lines:
                lines, self.lines = self.lines, {}
                joined = b",".join(lines.values()).decode()
                await self.send(text_data=f'{{"kind":"jobs","jobs":[{joined}]}}')

    async def _recheck(self) -> None:
        while True:
            await asyncio.sleep(RECHECK_S)
            projects = await self._projects()
            if projects is None:
                await self.close(NOT_SIGNED_IN)
                return
            await self._follow(projects)

    @database_sync_to_async
    def _projects(self) -> set[int] | None:
        user = sockets.current_user(self.scope)
        return set(Project.objects.visible_to(user).values_list("pk", flat=True)) if isinstance(user, User) else None


class NoSocket(AsyncWebsocketConsumer):
    """A socket for unknown addresses."""

    async def connect(self) -> None:
        await self.accept()
        await self.close(NOT_FOUND)


_headers: dict[int, tuple[float, asyncio.Task[dict[str, Any]]]] = {}


async def shared_header(job_id: int) -> dict[str, Any]:
    """Return a job's header from the database; sockets that request it within a second share one query."""
    read_at, task = _headers.get(job_id, (0.0, None))
    if task is None or time.monotonic() - read_at > 1 or task.get_loop() is not asyncio.get_running_loop():
        if len(_headers) > 1_000:
            _headers.clear()
        task = asyncio.create_task(_read_header(job_id))
        _headers[job_id] = (time.monotonic(), task)
    return await asyncio.shield(task)


@database_sync_to_async
def _read_header(job_id: int) -> dict[str, Any]:
    attempt = Attempt.objects.filter(job_id=job_id).order_by("-number").first()
    return live.header(attempt) if attempt else {}


def as_json(frame: bytes) -> str:
    """Return a frame for scripts: the same header, with the columns in their places."""
    about, data = live.unpack(frame)
    for entry, columns in zip(about.get("series", ()), live.columns_of(about, data), strict=True):
        entry.update({name: [json_float(float(x)) for x in column] for name, column in columns.items()})
    return msgspec.json.encode(about).decode()
