"""Test who may listen: sockets that are refused, removed, or closed because access can no longer be checked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from asgiref.sync import sync_to_async
from django.db import OperationalError

from jobs.models import Job
from jobs.sockets import consumers
from portal.http import sockets
from portal.models import Membership, Project, Token, User
from tests.jobs.reporting import attempt_of
from tests.jobs.sockets.listening import ORIGIN, Socket, play
from tests.lab import signed_in
from tests.redis import Server

pytestmark = pytest.mark.django_db(transaction=True)


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
        assert socket.answered[b"cache-control"] == b"private, no-store"
        assert await socket.hear("hello") == consumers.NOT_FOUND

    play(scene)


def test_a_visitor_who_is_not_signed_in_is_informed(ada: User) -> None:
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


def test_sockets_of_a_person_and_of_a_token_are_counted(server: Server, ada: User, settings: Any) -> None:
    """A single read token once opened a thousand sockets."""
    settings.VIGIL_SOCKETS = 4
    tokens = [{"authorization": f"Bearer {Token.issue(ada, name)[1]}"} for name in ("one", "other")]
    client = signed_in(ada)

    async def opened(*arguments: Any, **headers: str) -> tuple[Socket, Any]:
        socket = Socket("/ws/jobs", *arguments, **headers)
        await socket.connect()
        return socket, await socket.hear("hello")

    async def scene() -> None:
        open_sockets = [await opened(**tokens[0]) for _ in range(2)]
        refused, code = await opened(**tokens[0])
        assert code == sockets.TOO_MANY, "a token may have half of what its person may"
        await refused.disconnect()
        open_sockets += [await opened(**tokens[1]), await opened(client)]
        refused, code = await opened(client)
        assert code == sockets.TOO_MANY
        await refused.disconnect()
        await open_sockets.pop()[0].disconnect()
        socket, hello = await opened(client)
        assert hello == {"kind": "hello"}, "the place of one that has gone is free"
        for other, _ in [*open_sockets, (socket, hello)]:
            await other.disconnect()
        assert not consumers._places.taken

    play(scene)


def test_other_sites_pages_and_cookies_without_a_page_are_turned_away(ada: User) -> None:
    job_id = attempt_of().job_id
    client = signed_in(ada)
    cookie = f"sessionid={client.cookies['sessionid'].value}"

    async def scene() -> None:
        for headers in (
            {"origin": "http://evil.example", "cookie": cookie},
            {"origin": "null", "cookie": cookie},
            {"origin": "http://[", "cookie": cookie},
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
@pytest.mark.lengthy
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
        monkeypatch.setattr(sockets, "current_user", unreachable)
        assert await socket.hear("heartbeat") == consumers.GOING_AWAY

    play(scene)
    assert "server closed the connection" in caplog.text


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
