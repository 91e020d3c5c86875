"""Sockets: who may listen, what they hear, and that nothing falls between joining and reading history."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from asgiref.sync import sync_to_async
from asgiref.testing import ApplicationCommunicator
from channels.db import database_sync_to_async
from django.conf import LazySettings
from django.db import OperationalError, connections
from django.test import Client

from jobs import consumers, live, reports
from jobs.models import Attempt, Job
from portal import hub, sockets
from portal.asgi import application
from portal.models import Membership, Project, Token, User
from tests.jobs.reporting import Spooled, attempt_of, post
from tests.lab import signed_in
from tests.redis import Server, redis_up

pytestmark = pytest.mark.django_db(transaction=True)
ORIGIN = "http://127.0.0.1:8000"


@pytest.fixture
def server(tmp_path: Path, settings: LazySettings, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    with redis_up(tmp_path / "redis") as server:
        settings.REDIS_URL = server.url
        monkeypatch.setattr(live, "_silent_until", 0.0)
        live._redis.cache_clear()
        yield server
    live._redis.cache_clear()


@pytest.fixture
def ada() -> User:
    user = User.objects.create_user("ada")
    project = Project.objects.create(slug="default")
    Membership.objects.create(user=user, project=project)
    return user


class Socket(ApplicationCommunicator):
    """A browser's or (without a client) a script's end of a websocket."""

    def __init__(self, path: str, client: Client | None = None, **headers: str) -> None:
        told = {"host": "127.0.0.1:8000"}
        if client:
            cookies = "; ".join(f"{name}={morsel.value}" for name, morsel in client.cookies.items())
            told |= {"cookie": cookies, "origin": ORIGIN}
        told |= headers
        path, _, query = path.partition("?")
        scope = {
            "type": "websocket",
            "path": path,
            "query_string": query.encode(),
            "headers": [(name.encode(), value.encode()) for name, value in told.items()],
            "subprotocols": [],
        }
        super().__init__(application, scope)

    async def connect(self) -> int | None:
        """None once accepted, else the code with which it was closed."""
        await self.send_input({"type": "websocket.connect"})
        answer = await self.receive_output(10)
        return None if answer["type"] == "websocket.accept" else int(answer["code"])

    async def disconnect(self) -> None:
        await self.send_input({"type": "websocket.disconnect", "code": 1000})
        await self.wait(10)

    async def hear(self, kind: str = "", timeout: float = 10) -> Any:
        """The next JSON text of this kind, or the next frame's header with its columns."""
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
            await hub.of_this_process("", consumers.relay_for).close()
            await database_sync_to_async(connections.close_all)()

    asyncio.run(whole())


async def take(attempt: Attempt, *cuts: Any) -> None:
    await sync_to_async(lambda: reports.take(attempt.pk, post(*cuts)))()


def test_a_page_hears_what_is_reported_after_it_joined(server: Server, ada: User) -> None:
    attempt = attempt_of()
    client = signed_in(ada)

    async def scene() -> None:
        stream = Spooled().log(1, loss=2.5).log(2, loss=2.25, step_seconds=0.5).tell("phase", phase="save", step=2)
        await take(attempt, (stream, 0, 1))
        socket = Socket(f"/ws/jobs/{attempt.job_id}", client)
        assert await socket.connect() is None
        hello = await socket.hear("hello")
        assert (hello["version"], hello["number"], hello["step"]) == (1, 1, 1)
        await take(attempt, (stream, 1, 3))
        header, columns = await socket.hear()
        assert (header["version"], header["step"], header["phase"]) == (2, 2, "save")
        assert [s["name"] for s in header["series"]] == ["loss", "step_seconds"]
        assert columns == [{"step": [2.0], "value": [2.25]}, {"step": [2.0], "value": [0.5]}]
        assert header["events"] == [
            {"kind": "phase", "time": 1000.0, "rank": 0, "incarnation": 0, "phase": "save", "step": 2}
        ]
        await socket.disconnect()

    play(scene)


def test_a_script_hears_json_with_its_token(server: Server, ada: User) -> None:
    attempt = attempt_of()
    _, secret = Token.issue(ada, "script")

    async def scene() -> None:
        socket = Socket(f"/ws/jobs/{attempt.job_id}?format=json", authorization=f"Bearer {secret}")
        assert await socket.connect() is None
        await socket.hear("hello")
        await take(attempt, Spooled().log(1, loss=float("nan")))
        event = await socket.receive_output(10)
        told = json.loads(event["text"])
        assert told["version"] == 1
        assert told["series"] == [
            {"name": "loss", "kind": "value", "rank": 0, "incarnation": 0, "n": 1, "step": [1.0], "value": ["NaN"]}
        ]
        await socket.disconnect()

    play(scene)


def test_ranks_become_a_band_once_all_have_reported_a_step(server: Server, ada: User) -> None:
    attempt = attempt_of()
    client = signed_in(ada)

    async def scene() -> None:
        # Reported before anybody looked: rank 1's half of step 1.
        ranks = [Spooled(rank=rank).log(1, loss=rank + 1.0).log(2, loss=rank + 2.0) for rank in range(3)]
        await take(attempt, (ranks[1], 0, 2))
        socket = Socket(f"/ws/jobs/{attempt.job_id}", client)
        alone = Socket(f"/ws/jobs/{attempt.job_id}?rank=2", client)
        await socket.connect()
        await socket.hear("hello")
        await alone.connect()
        await alone.hear("hello")
        await take(attempt, (ranks[0], 0, 2), (ranks[2], 0, 1))
        header, columns = await socket.hear()
        assert [(s["kind"], s["rank"], s["n"]) for s in header["series"]] == [("value", 0, 2)]
        header, columns = await socket.hear()
        assert [(s["name"], s["kind"]) for s in header["series"]] == [("loss", "band")]
        assert header["extra"]
        assert columns == [{"step": [1.0], "min": [1.0], "median": [2.0], "max": [3.0], "worst": [2.0]}]
        await take(attempt, (ranks[2], 1, 2))
        await socket.hear()
        header, columns = await socket.hear()
        assert columns == [{"step": [2.0], "min": [2.0], "median": [3.0], "max": [4.0], "worst": [2.0]}]
        heard = [await alone.hear() for _ in range(3)]
        own = [(h, c) for h, c in heard if h["series"] and h["series"][0].get("rank") == 2]
        assert own[0][1] == [{"step": [1.0], "value": [3.0]}]
        await socket.disconnect()
        await alone.disconnect()

    play(scene)


def test_a_state_change_is_announced_with_a_new_version(server: Server, ada: User) -> None:
    attempt = attempt_of()
    client = signed_in(ada)

    async def scene() -> None:
        socket = Socket(f"/ws/jobs/{attempt.job_id}", client)
        lists = Socket("/ws/jobs", client)
        await socket.connect()
        await socket.hear("hello")
        await lists.connect()
        await lists.hear("hello")
        await sync_to_async(Attempt.objects.filter(pk=attempt.pk).update)(state="completed")
        await sync_to_async(live.announce)(attempt.pk)
        header, _ = await socket.hear()
        assert (header["state"], header["version"], header["series"]) == ("completed", 1, [])
        told = await lists.hear("jobs")
        assert [(job["job"], job["state"]) for job in told["jobs"]] == [(attempt.job_id, "completed")]
        await socket.disconnect()
        await lists.disconnect()

    play(scene)


def test_lists_hear_only_of_their_persons_projects_and_once_a_second(server: Server, ada: User) -> None:
    mine = attempt_of()
    stranger = User.objects.create_user("bob")
    elsewhere = Project.objects.create(slug="elsewhere")
    job = Job.objects.create(project=elsewhere, owner=stranger, name="x", kind="script", spec={}, spec_toml="")
    theirs = attempt_of(job)
    client = signed_in(ada)

    async def scene() -> None:
        lists = Socket("/ws/jobs", client)
        await lists.connect()
        await lists.hear("hello")
        stream = Spooled()
        for step in range(20):
            stream.log(step, loss=1.0)
            await take(mine, (stream, step, step + 1))
        await take(theirs, Spooled().log(1, loss=1.0))
        told = await lists.hear("jobs")
        again = told if told["jobs"][0]["step"] == 19 else await lists.hear("jobs")
        assert [(job["job"], job["step"]) for job in again["jobs"]] == [(mine.job_id, 19)]
        await lists.disconnect()

    play(scene)


@pytest.mark.parametrize("number", ["theirs", "999999", str(2**63), str(2**70)])
def test_anothers_job_is_not_found(server: Server, ada: User, number: str) -> None:
    stranger = User.objects.create_user("bob")
    elsewhere = Project.objects.create(slug="elsewhere")
    job = Job.objects.create(project=elsewhere, owner=stranger, name="x", kind="script", spec={}, spec_toml="")
    path = f"/ws/jobs/{job.pk if number == 'theirs' else number}"
    client = signed_in(ada)

    async def scene() -> None:
        socket = Socket(path, client)
        await socket.connect()
        assert await socket.hear("hello") == consumers.NOT_FOUND

    play(scene)


def test_who_is_not_signed_in_is_told_so(ada: User) -> None:
    job_id = attempt_of().job_id
    _, secret = Token.issue(ada, "old")
    Token.objects.update(expires_at="2000-01-01T00:00Z")

    async def scene() -> None:
        for path in (f"/ws/jobs/{job_id}", "/ws/jobs"):
            for headers in ({"origin": ORIGIN}, {"authorization": f"Bearer {secret}"}):
                socket = Socket(path, **headers)
                await socket.connect()
                assert await socket.hear("hello") == consumers.NOT_SIGNED_IN
        socket = Socket(f"/ws/jobs/{job_id}?token={secret}", origin=ORIGIN)
        await socket.connect()
        assert await socket.hear("hello") == consumers.NOT_SIGNED_IN, "no token in the query"

    play(scene)


def test_other_sites_pages_and_cookies_without_a_page_are_turned_away(ada: User) -> None:
    job_id = attempt_of().job_id
    client = signed_in(ada)
    cookie = f"sessionid={client.cookies['sessionid'].value}"

    async def scene() -> None:
        for headers in (
            {"origin": "http://evil.example", "cookie": cookie},
            {"origin": "null", "cookie": cookie},
            {"cookie": cookie},
            {"origin": "http://evil.example", "host": "evil.example", "cookie": cookie},
        ):
            socket = Socket(f"/ws/jobs/{job_id}", **headers)
            assert await socket.connect() == 4403

    play(scene)


def test_an_unknown_address_is_not_found(ada: User) -> None:
    client = signed_in(ada)

    async def scene() -> None:
        for path in ("/ws/nothing", "/", "/ws/jobs/x"):
            socket = Socket(path, client)
            await socket.connect()
            assert await socket.hear("hello") == consumers.NOT_FOUND

    play(scene)


@pytest.mark.parametrize(
    "change",
    [
        lambda user: Membership.objects.filter(user=user).delete(),
        lambda user: User.objects.filter(pk=user.pk).update(is_active=False),
        lambda user: signed_in_sessions_end(),
    ],
    ids=["left the project", "deactivated", "signed out"],
)
def test_who_may_not_see_it_any_more_is_shown_out(
    server: Server, ada: User, monkeypatch: pytest.MonkeyPatch, change: Callable[[User], Any]
) -> None:
    monkeypatch.setattr(consumers, "RECHECK_S", 0.05)
    attempt = attempt_of()
    client = signed_in(ada)

    async def scene() -> None:
        socket = Socket(f"/ws/jobs/{attempt.job_id}", client)
        await socket.connect()
        await socket.hear("hello")
        await sync_to_async(change)(ada)
        assert await socket.hear("heartbeat") == consumers.NOT_FOUND

    play(scene)


@pytest.mark.parametrize("path", ["/ws/jobs/{}", "/ws/jobs"])
def test_a_socket_that_cannot_be_checked_any_more_is_closed(
    path: str, ada: User, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(consumers, "RECHECK_S", 0.05)
    attempt = attempt_of()
    client = signed_in(ada)

    def unreachable(scope: Any) -> None:
        raise OperationalError("server closed the connection")

    async def scene() -> None:
        socket = Socket(path.format(attempt.job_id), client)
        await socket.connect()
        await socket.hear("hello")
        monkeypatch.setattr(sockets, "still", unreachable)
        assert await socket.hear("heartbeat") == consumers.GOING

    play(scene)
    assert "server closed the connection" in caplog.text


def test_a_socket_whose_messages_cannot_be_told_is_closed(
    server: Server, ada: User, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    attempt = attempt_of()
    client = signed_in(ada)

    def broken(frame: bytes) -> str:
        raise ValueError("not a frame")

    monkeypatch.setattr(consumers, "as_json", broken)

    async def scene() -> None:
        told, binary = (Socket(f"/ws/jobs/{attempt.job_id}{query}", client) for query in ("?format=json", ""))
        for socket in (told, binary):
            await socket.connect()
            await socket.hear("hello")
        await take(attempt, Spooled().log(1, loss=1.0))
        assert await told.hear("heartbeat") == consumers.GOING
        header, _ = await binary.hear()
        assert header["version"] == 1, "the others hear it all the same"
        await binary.disconnect()

    play(scene)
    assert "not a frame" in caplog.text


def test_a_rank_of_any_length_does_no_harm(server: Server, ada: User) -> None:
    attempt = attempt_of()
    client = signed_in(ada)

    async def scene() -> None:
        for rank in ("9" * 5_000, "²", "-1", "x", ""):
            socket = Socket(f"/ws/jobs/{attempt.job_id}?rank={rank}", client)
            await socket.connect()
            await socket.hear("hello")
            await socket.disconnect()

    play(scene)


def signed_in_sessions_end() -> None:
    from django.contrib.sessions.models import Session

    Session.objects.all().delete()


def test_heartbeats_tell_the_version_even_without_redis(ada: User, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(consumers, "HEARTBEAT_S", 0.1)
    monkeypatch.setattr(hub, "_ACK_S", 0.05)
    attempt = attempt_of()
    client = signed_in(ada)

    async def scene() -> None:
        socket = Socket(f"/ws/jobs/{attempt.job_id}", client)
        await socket.connect()
        assert (await socket.hear("hello"))["version"] == 0
        await take(attempt, Spooled().log(1, loss=1.0))
        deadline = time.monotonic() + 10
        while (await socket.hear("heartbeat"))["version"] != 1:
            assert time.monotonic() < deadline
        await socket.disconnect()

    play(scene)


def test_after_an_outage_more_than_a_frame_holds_is_left_to_be_read(
    server: Server, ada: User, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "POINTS", 3)
    attempt = attempt_of()
    client = signed_in(ada)

    async def scene() -> None:
        socket = Socket(f"/ws/jobs/{attempt.job_id}", client)
        await socket.connect()
        await socket.hear("hello")
        stream = Spooled()
        for step in range(4):
            stream.log(step, loss=1.0)
        await take(attempt, stream)
        header, _ = await socket.hear()
        assert header["partial"]
        assert header["series"] == []
        await socket.disconnect()

    play(scene)
