"""Test waking the follower by Slurm's hooks: with the secret, any number of times, and for one poll at most."""

from __future__ import annotations

import http.server
import json
import os
import socket
import stat
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from django.core.cache import cache
from django.test import Client

from jobs import tasks
from jobs.following import follow, wake
from portal import publish, wakes
from portal.wakes import FOLLOWER
from tests.redis import Server, redis_up
from tests.waiting import PATIENCE_S, until

SECRET = "a secret of the lab's own Slurm"
ADDRESS = "/api/v1/scheduler/wake"
SCRIPT = Path(__file__).resolve().parents[3] / "docs" / "slurm" / "jobcomp.sh"


class Queued:
    """The tasks that were queued: (task, arguments, seconds to wait)."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[tuple[tuple[object, ...], float | None]] = []
        monkeypatch.setattr(wakes, "send", self)

    def __call__(
        self, task: str, arguments: tuple[object, ...], *, expires_s: float, countdown: float | None = None
    ) -> None:
        assert task == "jobs.tasks.wake"
        self.calls.append((arguments, countdown))


@pytest.fixture
def server(tmp_path: Path, settings: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setattr(wakes, "_retry_at", 0.0)  # another test's Redis may just have been away
    with redis_up(tmp_path / "redis") as created:
        settings.REDIS_URL = created.url
        publish.connection.cache_clear()
        yield created
    publish.connection.cache_clear()


@pytest.fixture
def queued(server: Server, monkeypatch: pytest.MonkeyPatch) -> Queued:
    return Queued(monkeypatch)


@pytest.fixture(autouse=True)
def _secret(settings: Any) -> Iterator[None]:
    settings.VIGIL_PUSH_SECRET = SECRET
    cache.clear()
    yield
    cache.clear()


def push(authorization: str = f"Bearer {SECRET}", **more: Any) -> Any:
    return Client().post(ADDRESS, headers={"Authorization": authorization} if authorization else {}, **more)


@pytest.mark.django_db
def test_the_secret_wakes_it(queued: Queued) -> None:
    answer = push()
    assert (answer.status_code, answer.json()) == (202, {"woken": True})
    assert queued.calls == [((), None)]


@pytest.mark.django_db
@pytest.mark.parametrize(
    "authorization",
    [
        "",
        "Bearer",
        "Bearer ",
        f"Basic {SECRET}",
        f"Bearer {SECRET}x",
        f"Bearer {SECRET[:-1]}",
        SECRET,
        "Bearer ä\udcff",
    ],
)
def test_nobody_else_does(authorization: str, queued: Queued) -> None:
    assert push(authorization).status_code == 401
    assert not queued.calls


@pytest.mark.django_db
def test_guessing_is_bounded_and_keeps_nobody_out(queued: Queued) -> None:
    answers = [push("Bearer guess").status_code for _ in range(wake.MAX_WRONG_SECRETS + 5)]
    assert set(answers[: wake.MAX_WRONG_SECRETS]) == {401}
    assert answers[-1] == 429
    assert push().status_code == 202


@pytest.mark.django_db
def test_without_a_secret_there_is_nothing_here(queued: Queued, settings: Any) -> None:
    settings.VIGIL_PUSH_SECRET = ""
    for authorization in ("", "Bearer ", f"Bearer {SECRET}"):
        assert push(authorization).status_code == 404
    assert not queued.calls


@pytest.mark.django_db
def test_a_session_needs_no_csrf_and_any_body_is_ignored(queued: Queued) -> None:
    client = Client(enforce_csrf_checks=True)
    answer = client.post(
        ADDRESS, b"\xff{", content_type="application/json", headers={"Authorization": f"Bearer {SECRET}"}
    )
    assert answer.status_code == 202


def test_many_wake_ups_cause_a_single_poll(queued: Queued) -> None:
    assert all(FOLLOWER.request() for _ in range(500))
    assert len(queued.calls) == 1


def test_what_happens_during_a_poll_is_polled_again(queued: Queued, monkeypatch: pytest.MonkeyPatch) -> None:
    """No two polls begin right after each other."""
    monkeypatch.setattr(follow, "tick", lambda: FOLLOWER.request())
    tasks.wake()
    assert queued.calls[0] == ((), FOLLOWER.spacing_s)


def test_echoes_follow_and_are_one_row_at_a_time(queued: Queued, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follow, "tick", lambda: True)
    tasks.wake()
    tasks.wake()
    assert queued.calls == [((1,), wake.ECHOES_S[0])]
    tasks.wake(1)
    assert queued.calls[1:] == [((2,), wake.ECHOES_S[1])]
    tasks.wake(2)
    assert len(queued.calls) == 2


def test_a_lost_wake_does_not_keep_others_away(queued: Queued, server: Server) -> None:
    FOLLOWER.request()
    with redis.Redis.from_url(server.url) as client:
        assert 0 < client.pttl(FOLLOWER.pending_key) <= wakes.LOST_S * 1000


@pytest.mark.django_db
def test_without_redis_the_tick_goes_on(queued: Queued, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    server.kill()
    assert push().json() == {"woken": False}
    ticks: list[int] = []
    monkeypatch.setattr(follow, "tick", lambda: ticks.append(1))
    tasks.wake()
    assert ticks == [1]


# The script that Slurm calls.


class Listener(http.server.BaseHTTPRequestHandler):
    received: list[tuple[str, str | None]]

    def do_POST(self) -> None:
        self.received.append((self.path, self.headers["Authorization"]))
        self.send_response(202)
        self.end_headers()
        self.wfile.write(b'{"woken":true}')

    def log_message(self, *words: object) -> None:
        pass


def configured(folder: Path, port: int) -> dict[str, str]:
    conf = folder / "push.conf"
    conf.write_text(f'url = "http://127.0.0.1:{port}{ADDRESS}"\nheader = "Authorization: Bearer {SECRET}"\n')
    conf.chmod(0o600)
    return {"PATH": "", "VIGIL_PUSH_CONF": str(conf)}  # Slurm calls it with next to no environment


@pytest.mark.slow
def test_the_script_pushes(tmp_path: Path) -> None:
    received: list[tuple[str, str | None]] = []
    handler = type("Here", (Listener,), {"received": received})
    with http.server.HTTPServer(("127.0.0.1", 0), handler) as portal:
        threading.Thread(target=portal.serve_forever, daemon=True).start()
        environment = configured(tmp_path, portal.server_port)
        done = subprocess.run(["/bin/sh", SCRIPT], env=environment, capture_output=True, timeout=10, check=False)
        assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")
        until(lambda: received == [(ADDRESS, f"Bearer {SECRET}")], "the push")
        shown = subprocess.run(["/bin/sh", SCRIPT, "--test"], env=environment, capture_output=True, check=False)
        assert json.loads(shown.stdout) == {"woken": True}
        portal.shutdown()


@pytest.mark.slow
def test_the_script_waits_for_nobody_and_never_fails(tmp_path: Path) -> None:
    """If nothing listens, nobody answers or the file is missing, slurmctld and the job continue at once."""
    patient = tmp_path / "patient.sh"
    patient.write_text(Path(SCRIPT).read_text().replace("--max-time 2", f"--max-time {PATIENCE_S:g}"))
    assert f"--max-time {PATIENCE_S:g}" in patient.read_text()
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        for environment in (
            configured(tmp_path, deaf.getsockname()[1]),
            configured(tmp_path, 9),
            {"PATH": "", "VIGIL_PUSH_CONF": str(tmp_path / "missing")},
        ):
            began = time.monotonic()
            done = subprocess.run(["/bin/sh", patient], env=environment, capture_output=True, check=False)
            assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")
            assert time.monotonic() - began < PATIENCE_S / 2


@pytest.mark.slow
def test_what_the_script_started_outlives_its_process_group(tmp_path: Path) -> None:
    """Slurm kills the group of a hook that has ended."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        environment = configured(tmp_path, listener.getsockname()[1])
        hook = subprocess.Popen(["/bin/sh", SCRIPT], env=environment, start_new_session=True)
        hook.wait(10)
        with pytest.raises(ProcessLookupError):
            os.killpg(hook.pid, 9)
        listener.settimeout(5)
        connection, _ = listener.accept()
        with connection:
            assert connection.recv(4096).startswith(f"POST {ADDRESS}".encode())


def test_the_script_may_be_run() -> None:
    assert SCRIPT.stat().st_mode & stat.S_IXOTH
