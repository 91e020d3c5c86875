"""Test the fast path of reports in the web process, which bypasses Django: it gives the same answers."""

from __future__ import annotations

import asyncio
import gzip
import json
import os
from typing import Any

import pytest
from asgiref.testing import ApplicationCommunicator
from django.db import connections

from jobs.api.reports import FAST_PATH
from jobs.models import Attempt, Stream
from portal.http import posts
from portal.http.posts import COMPRESSED_BYTES, Intake
from tests.jobs.reporting import SECRET, Spooled, attempt_of, frame, packed

pytestmark = pytest.mark.django_db(transaction=True)


class Beyond(Exception):
    """Raised when the request was passed on to Django."""


async def django(scope: Any, receive: Any, send: Any) -> None:
    raise Beyond


async def close(intake: Intake) -> None:
    """Close the connections of its threads: a database that somebody uses cannot be dropped."""
    if intake.pool:
        await asyncio.get_running_loop().run_in_executor(intake.pool, connections.close_all)
        intake.pool.shutdown()


def knock(attempt: Attempt, *pieces: bytes, secret: str = SECRET, gone: bool = False) -> tuple[int, Any, int] | None:
    """Return the status, the answer and the number of unread pieces; None if there was no answer."""

    async def play() -> tuple[int, Any, int] | None:
        intake = Intake(django, [FAST_PATH], threads=1)  # the thread that opened the connections must close them
        scope = {
            "type": "http",
            "method": "POST",
            "path": f"/api/v1/attempts/{attempt.pk}/reports",
            "headers": [(b"authorization", f"Bearer {secret}".encode()), (b"content-encoding", b"gzip")],
        }
        door = ApplicationCommunicator(intake, scope)
        for i, piece in enumerate(pieces):
            await door.send_input({"type": "http.request", "body": piece, "more_body": gone or i < len(pieces) - 1})
        if gone:
            await door.send_input({"type": "http.disconnect"})
            await door.wait(10)
            assert await door.receive_nothing()
            await close(intake)
            return None
        start = await door.receive_output(10)
        body = await door.receive_output(10)
        await door.wait(10)
        await close(intake)
        return start["status"], json.loads(body["body"]), door.input_queue.qsize()

    return asyncio.run(play())


@pytest.fixture
def attempt() -> Attempt:
    return attempt_of()


def test_a_post_in_pieces_is_taken(attempt: Attempt) -> None:
    stream = Spooled().log(1, loss=1.0)
    body = packed(frame(stream))
    assert knock(attempt, body[:10], body[10:20], body[20:]) == (200, {"streams": {stream.uid: 1}, "version": 1}, 0)


def test_refusals_are_problem_documents(attempt: Attempt) -> None:
    body = packed(frame(Spooled().log(1, loss=1.0)))
    for sent, secret, status in ((body, "wrong", 401), (body[:-4], SECRET, 422), (b"", SECRET, 422)):
        answer = knock(attempt, sent, secret=secret)
        assert answer is not None
        assert (answer[0], answer[1]["status"]) == (status, status)
        assert answer[1]["detail"]
    assert not Stream.objects.exists()


def test_a_body_without_end_is_read_no_further_than_its_limit(attempt: Attempt) -> None:
    whole = gzip.compress(os.urandom(4 * COMPRESSED_BYTES))
    pieces = [whole[at : at + 300_000] for at in range(0, len(whole), 300_000)]
    answer = knock(attempt, *pieces)
    assert answer is not None
    assert (answer[0], answer[2]) == (413, len(pieces) - (COMPRESSED_BYTES // 300_000 + 1))


def test_a_strangers_body_is_not_read(attempt: Attempt) -> None:
    answer = knock(attempt, *[b"x" * 10_000] * 50, secret="wrong")
    assert answer is not None
    assert (answer[0], answer[2]) == (401, 50), "not a piece of it"
    assert not Stream.objects.exists()


def test_large_posts_of_a_sender_are_counted(attempt: Attempt, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(posts, "MAX_LARGE_POSTS", 0)
    answer = knock(attempt, packed(frame(Spooled().log(1, loss=1.0))))
    assert answer is not None
    assert (answer[0], answer[2]) == (503, 1)


def test_a_shipper_that_goes_away_in_the_middle_leaves_nothing(attempt: Attempt) -> None:
    assert knock(attempt, packed(frame(Spooled().log(1, loss=1.0)))[:20], gone=True) is None
    assert not Stream.objects.exists()


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/api/v1/attempts/1/reports"),
        ("POST", "/api/v1/attempts/x/reports"),
        ("POST", "/api/v1/attempts/1/reports/"),
    ],
)
def test_everything_else_goes_to_django(method: str, path: str) -> None:
    scope = {"type": "http", "method": method, "path": path, "headers": []}
    with pytest.raises(Beyond):
        asyncio.run(Intake(django, [FAST_PATH])(scope, None, None))  # type: ignore[arg-type]
