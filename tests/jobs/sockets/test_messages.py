"""Test what sockets receive, and that nothing is lost between subscribing and reading history."""

from __future__ import annotations

import asyncio
import json
import time
from threading import Event
from typing import Any

import pytest
from asgiref.sync import sync_to_async

from jobs import live
from jobs.intake.reports import SERIES
from jobs.models import Attempt, Job
from jobs.sockets import consumers
from jobs.sockets.relay import JobRelay
from portal import hub
from portal.models import Project, Token, User
from portal.series import bands
from tests.jobs.reporting import Spooled, attempt_of
from tests.jobs.sockets.listening import Socket, play, take
from tests.lab import signed_in
from tests.redis import Server
from tests.waiting import PATIENCE_S

pytestmark = pytest.mark.django_db(transaction=True)


def test_a_page_hears_what_is_reported_after_it_joined(server: Server, ada: User) -> None:
    attempt = attempt_of()
    client = signed_in(ada)

    async def scene() -> None:
        stream = Spooled().log(1, loss=2.5).log(2, loss=2.25, step_seconds=0.5).add_event("phase", phase="save", step=2)
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
        payload = json.loads(event["text"])
        assert payload["version"] == 1
        assert payload["series"] == [
            {"name": "loss", "kind": "value", "rank": 0, "incarnation": 0, "n": 1, "step": [1.0], "value": ["NaN"]}
        ]
        await socket.disconnect()

    play(scene)


def test_ranks_become_a_band_once_all_have_reported_a_step(server: Server, ada: User) -> None:
    attempt = attempt_of()
    client = signed_in(ada)

    async def scene() -> None:
        # Reported before anybody listened: rank 1's half of step 1.
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
        received = [await alone.hear() for _ in range(3)]
        of_rank_2 = [(h, c) for h, c in received if h["series"] and h["series"][0].get("rank") == 2]
        assert of_rank_2[0][1] == [{"step": [1.0], "value": [3.0]}]
        await socket.disconnect()
        await alone.disconnect()

    play(scene)


def test_of_a_thousand_series_each_has_its_band(server: Server, ada: User) -> None:
    """Use as many series as an attempt may have, all of them in one message of each rank."""
    attempt = attempt_of()
    client = signed_in(ada)
    values = {f"norm/{number}": 1.0 for number in range(SERIES)}

    async def scene() -> None:
        socket = Socket(f"/ws/jobs/{attempt.job_id}", client)
        await socket.connect()
        await socket.hear("hello")
        ranks = [Spooled(rank=rank).log(1, **values) for rank in range(2)]
        await take(attempt, (ranks[0], 0, 1))
        await socket.hear()
        await take(attempt, (ranks[1], 0, 1))
        await socket.hear()
        header, _ = await socket.hear()
        assert {series["name"] for series in header["series"] if series["kind"] == "band"} == values.keys()
        await socket.disconnect()

    play(scene)


def test_a_relay_that_opens_is_fed_and_ticks(ada: User, monkeypatch: pytest.MonkeyPatch) -> None:
    """Earlier reports are gathered in a thread; reports that arrive meanwhile are not lost."""
    attempt, begun, go_on = attempt_of(), Event(), Event()
    ranks = [Spooled(rank=rank).log(1, loss=rank + 1.0, step_seconds=1.0) for rank in range(3)]
    sent: list[bytes] = []
    gather = bands.BandCollector.add

    def slowly(*arguments: Any) -> None:
        gather(*arguments)
        begun.set()
        assert go_on.wait(10)

    def hurried(self: bands.BandCollector, now: float) -> None:
        go_on.set()  # the thread adds its next series while the tick goes through those that it finds
        while len(relay._gathering) < 2:
            time.sleep(0.001)

    async def scene() -> None:
        monkeypatch.setattr(live, "send", lambda messages: sent.append(messages[live.job_topic(attempt.job_id)]))
        await take(attempt, (ranks[0], 0, 1))
        await take(attempt, (ranks[1], 0, 1))
        monkeypatch.setattr(bands.BandCollector, "add", slowly)
        monkeypatch.setattr(bands.BandCollector, "overdue", hurried)
        opening = asyncio.create_task(relay.open())
        await asyncio.to_thread(begun.wait, 10)
        assert list(relay.tick()) == []
        assert len(list(relay.feed(sent[1], set()))) == 1, "the frame alone"
        go_on.set()
        await opening
        await take(attempt, (ranks[2], 0, 1))
        frames = [frame for _, frame in relay.feed(sent[2], set())]
        header, data = live.unpack(frames[-1])
        assert [(series["name"], series["kind"]) for series in header["series"]] == [
            ("loss", "band"), ("step_seconds", "band")
        ]  # fmt: skip
        assert live.columns_of(header, data)[0]["worst"].tolist() == [2.0]

    relay = JobRelay(attempt.job_id)
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
        report = await lists.hear("jobs")
        assert [(job["job"], job["state"]) for job in report["jobs"]] == [(attempt.job_id, "completed")]
        await socket.disconnect()
        await lists.disconnect()

    play(scene)


def test_lists_hear_only_of_their_persons_projects_and_once_a_second(server: Server, ada: User) -> None:
    attempt = attempt_of()
    stranger = User.objects.create_user("bob")
    elsewhere = Project.objects.create(slug="elsewhere")
    job = Job.objects.create(project=elsewhere, owner=stranger, name="x", kind="script", spec={}, spec_toml="")
    strangers_attempt = attempt_of(job)
    client = signed_in(ada)

    async def scene() -> None:
        lists = Socket("/ws/jobs", client)
        await lists.connect()
        await lists.hear("hello")
        stream = Spooled()
        for step in range(20):
            stream.log(step, loss=1.0)
            await take(attempt, (stream, step, step + 1))
        await take(strangers_attempt, Spooled().log(1, loss=1.0))
        report = await lists.hear("jobs")
        again = report if report["jobs"][0]["step"] == 19 else await lists.hear("jobs")
        assert [(job["job"], job["step"]) for job in again["jobs"]] == [(attempt.job_id, 19)]
        await lists.disconnect()

    play(scene)


def test_a_socket_with_messages_that_cannot_be_sent_is_closed(
    server: Server, ada: User, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    attempt = attempt_of()
    client = signed_in(ada)

    def broken(frame: bytes) -> str:
        raise ValueError("not a frame")

    monkeypatch.setattr(consumers, "as_json", broken)

    async def scene() -> None:
        report, binary = (Socket(f"/ws/jobs/{attempt.job_id}{query}", client) for query in ("?format=json", ""))
        for socket in (report, binary):
            await socket.connect()
            await socket.hear("hello")
        await take(attempt, Spooled().log(1, loss=1.0))
        assert await report.hear("heartbeat") == consumers.GOING_AWAY
        header, _ = await binary.hear()
        assert header["version"] == 1, "the others hear it all the same"
        await binary.disconnect()

    play(scene)
    assert "not a frame" in caplog.text


def test_heartbeats_carry_the_version_even_without_redis(ada: User, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(consumers, "HEARTBEAT_S", 0.1)
    monkeypatch.setattr(hub, "_ACK_S", 0.05)
    attempt = attempt_of()
    client = signed_in(ada)

    async def scene() -> None:
        socket = Socket(f"/ws/jobs/{attempt.job_id}", client)
        await socket.connect()
        assert (await socket.hear("hello"))["version"] == 0
        await take(attempt, Spooled().log(1, loss=1.0))
        deadline = time.monotonic() + PATIENCE_S
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
