"""Test `vigil up` from outside: it starts, keeps its children alive, refuses invalid settings, leaves nothing."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from portal.run import child as supervise
from portal.run import preflight, redis
from tests.stack import NAMES, REPOSITORY, Stack
from tests.waiting import PATIENCE_S, until

MakeStack = Callable[..., Stack]


@pytest.fixture(scope="module")
def recovering_stack(prepared_home: Path) -> Iterator[Stack]:
    """A stack for tests that break it and wait until it recovers."""
    stack = Stack(prepared_home)
    try:
        stack.start()
        yield stack
    finally:
        stack.close()


@pytest.mark.slow
def test_starts_serves_stops_within_five_seconds_and_starts_again(make_stack: MakeStack) -> None:
    stack = make_stack(fresh=True)
    stack.start()
    assert "Sign in: http://" in stack.output_of()
    for path in ("vigil.sqlite3", "cli.toml", "secret_key", "logs/web.log", "redis"):
        assert (stack.home / path).stat().st_mode & 0o007 == 0, f"{path} is nobody else's to read"
    assert httpx.get(f"{stack.url}/healthz", trust_env=False).status_code == 200
    pids = {name: stack.pid(name) for name in NAMES}
    assert all(os.getsid(pid) == pid for pid in pids.values()), "each in a session of its own"
    assert stack.stop(signal.SIGINT) < 5
    assert stack.process
    assert stack.process.returncode == 0
    assert stack.processes() == []

    url, secret = stack.url, (stack.home / "secret_key").read_text()
    stack.start()
    assert "Preparing" not in stack.output_of(), "the second start is quick"
    assert stack.url == url
    assert (stack.home / "secret_key").read_text() == secret


@pytest.mark.slow
def test_every_child_is_restarted(recovering_stack: Stack) -> None:
    stack = recovering_stack
    for name in NAMES:
        old = stack.kill(name)
        assert stack.wait_for_new(name, old) != old
        until(lambda name=name: f"{name} was killed by SIGKILL" in stack.output_of(), f"a word about {name}")
    # A connection that is made while no web process lives waits for the next one.
    stack.kill("web")
    assert httpx.get(f"{stack.url}/healthz", timeout=20, trust_env=False).status_code == 200


@pytest.mark.slow
def test_killed_supervisor_leaves_no_process_and_can_start_again(make_stack: MakeStack) -> None:
    stack = make_stack()
    stack.start()
    stack.kill("up")
    assert stack.process
    stack.process.wait(5)
    until(lambda: not stack.processes(), "every child to end", seconds=5)
    stack.start()
    assert httpx.get(f"{stack.url}/healthz", trust_env=False).status_code == 200


@pytest.mark.slow
def test_workers_take_tasks_again_after_redis_died(recovering_stack: Stack) -> None:
    stack = recovering_stack
    old = stack.kill("redis")
    stack.wait_for_new("redis", old)
    path = redis.socket_path(stack.home / "redis")
    until(lambda: redis.answers(path), "Redis")
    for queue in ("follow", "work", "diagnose"):
        # A message that names no task is still taken and thrown away, with a word in the log.
        send = f"import portal.celery as c; c.app.send_task('no.such.task.{queue}', queue={queue!r})"
        environment = {**stack.environment, "DJANGO_SETTINGS_MODULE": "portal.settings"}
        subprocess.run([sys.executable, "-c", send], cwd=REPOSITORY, env=environment, check=True)
        until(lambda queue=queue: f"no.such.task.{queue}" in stack.log(queue), f"{queue} to take a task")


@pytest.mark.slow
def test_a_home_has_a_single_portal(recovering_stack: Stack) -> None:
    stack = recovering_stack
    second = _up(stack, "--port", "0")
    assert second.returncode == 1
    assert f"already running from {stack.home} (process {stack.pid('up')}, {stack.url})" in second.stderr
    assert "VIGIL_HOME" in second.stderr


def test_port_in_use_names_the_process_and_the_remedy(make_stack: MakeStack) -> None:
    stack = make_stack(fresh=True)
    with socket.create_server(("127.0.0.1", 0)) as server:
        refused = _up(stack, "--port", str(server.getsockname()[1]))
    assert refused.returncode == 1
    assert f"is taken by process {os.getpid()}" in refused.stderr
    assert "VIGIL_PORT=" in refused.stderr
    assert len(refused.stderr.splitlines()) == 1


@pytest.mark.slow
def test_start_waits_for_the_port_of_a_killed_supervisors_web(make_stack: MakeStack) -> None:
    """A killed process holds its port for a moment on a busy machine; this one holds it until the test lets go."""
    stack = make_stack()
    hold = "import socket, sys; s = socket.create_server(('', int(sys.argv[1]))); print(flush=True); sys.stdin.read()"
    web = subprocess.Popen(
        [sys.executable, "-c", hold, str(stack.port), "console.web"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    with web:
        assert web.stdin
        assert web.stdout
        web.stdout.readline()
        ending = threading.Timer(1.0, web.stdin.close)
        ending.start()
        stack.start()
        ending.join()
    assert httpx.get(f"{stack.url}/healthz", trust_env=False).status_code == 200


@pytest.mark.parametrize(
    ("setting", "value", "word"),
    [
        ("VIGIL_PORT", "eighty", "'eighty' is not a port"),
        ("VIGIL_PORT", "70000", "'70000' is not a port"),
        ("VIGIL_HOST", "192.0.2.1", "does not have the address 192.0.2.1"),
        ("DATABASE_URL", "mysql://localhost/vigil", "DATABASE_URL mysql:// is not supported"),
        ("DATABASE_URL", "postgresql://127.0.0.1:1/vigil", "the database cannot be used: "),
        ("REDIS_URL", "redis://127.0.0.1:1/0", "REDIS_URL"),
        ("REDIS_URL", "nonsense", "REDIS_URL"),
        ("SECRET_KEY_FILE", "/nowhere/key", "/nowhere/key"),
    ],
)
def test_unusable_setting_is_one_sentence(make_stack: MakeStack, setting: str, value: str, word: str) -> None:
    stack = make_stack(fresh=True, **{setting: value})
    refused = _up(stack, *(() if setting == "VIGIL_PORT" else ("--port", "0")))
    assert refused.returncode == 1
    assert word in refused.stderr
    assert "Traceback" not in refused.stderr
    assert stack.processes() == []


def _up(stack: Stack, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "console.up", *arguments], cwd=REPOSITORY, env=stack.environment,
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip


def test_file_that_is_no_database_is_one_sentence(make_stack: MakeStack) -> None:
    stack = make_stack(fresh=True)
    (stack.home / "vigil.sqlite3").write_bytes(b"no database" * 1000)
    refused = _up(stack, "--port", "0")
    assert refused.returncode == 1
    assert refused.stderr.splitlines() == [
        "vigil up: the database cannot be used: file is not a database. Check DATABASE_URL."
    ]
    assert stack.processes() == []


@pytest.mark.parametrize("host", ["::1%nowhere", "192.0.2.1", "a..b"])
def test_wrong_host_is_not_reported_as_a_port_in_use(host: str) -> None:
    with pytest.raises(preflight.StartRefused, match=f"the address {host}: set VIGIL_HOST"):
        preflight.listen(host, 18_765)


def test_home_with_a_lock_of_somebody_else_is_one_sentence(make_stack: MakeStack) -> None:
    stack = make_stack(fresh=True, SECRET_KEY="k")
    (stack.home / "up.lock").mkdir()  # root may write every file
    refused = _up(stack, "--port", "0")
    assert refused.returncode == 1
    assert f"{stack.home}/up.lock is not writable" in refused.stderr
    assert len(refused.stderr.splitlines()) == 1


def test_without_redis_and_its_wheel_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr(redis.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(redis.NoRedis, match="apt-get install redis-server"):
        redis.find_server()


def test_bundled_redis_is_found_when_none_is_on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert subprocess.run([redis.find_server(), "--version"], capture_output=True, check=True).stdout


def test_long_home_is_refused(tmp_path: object) -> None:
    home = preflight.Path(str(tmp_path)) / ("d" * 100)
    with pytest.raises(redis.NoRedis, match="shorter VIGIL_HOME"):
        redis.command("redis-server", home)


def test_child_that_will_not_end_is_killed_in_time(tmp_path: object) -> None:
    folder = preflight.Path(str(tmp_path))
    deaf = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); "
        f"time.sleep({PATIENCE_S})"
    )
    child = supervise.Child("deaf", [sys.executable, "-c", deaf], folder / "deaf.log", folder, ready=_regex("deaf"))
    child.start()
    until(lambda: child.read_log() or child.is_ready, "the child")
    began = time.monotonic()
    assert supervise.stop([child], 0.2) == ["deaf"]
    assert time.monotonic() - began < PATIENCE_S / 2
    assert not psutil.pid_exists(child.pid or 0)


@pytest.mark.skipif(not preflight.Path("/proc/self/autogroup").exists(), reason="the kernel knows no sessions' shares")
def test_child_with_niceness_yields_to_other_sessions(tmp_path: object) -> None:
    folder = preflight.Path(str(tmp_path))
    script = "import os; print(os.nice(0), open('/proc/self/autogroup').read(), 'ready', flush=True)"
    child = supervise.Child("back", [sys.executable, "-c", script], folder / "back.log", folder, niceness=7)
    child.important, child.ready = None, _regex("ready")
    child.start()
    until(lambda: child.read_log() or child.is_ready, "the child")
    niceness, session = child.log.read_text().split(" ", 1)
    assert int(niceness) == os.nice(0) + 7
    assert session.splitlines()[0].endswith("nice 7")
    child.kill()


def test_back_off_grows_and_is_forgotten_after_a_long_life(tmp_path: object) -> None:
    folder = preflight.Path(str(tmp_path))
    child = supervise.Child("short", [sys.executable, "-c", ""], folder / "short.log", folder)
    child.start()
    waits = [child.note_death() for _ in range(8)]
    assert waits == [0.1, 0.5, 1.0, 2.0, 5.0, 10.0, 10.0, 10.0]
    child.started_at -= supervise.WELL_AFTER_S + 1
    assert child.note_death() == 0.1
    child.kill()


def test_log_shows_what_matters_and_only_whole_lines(tmp_path: object) -> None:
    folder = preflight.Path(str(tmp_path))
    child = supervise.Child("web", [], folder / "web.log", folder, ready=_regex("ready"))
    child.log.write_bytes(b"2026 INFO x: fine\n2026 WARNING x: odd\nValueError: bad\nall rea")
    assert child.read_log() == ["2026 WARNING x: odd", "ValueError: bad"]
    assert not child.is_ready
    with child.log.open("ab") as file:
        file.write(b"dy\n")
    assert child.read_log() == []
    assert child.is_ready


def _regex(text: str) -> object:
    import re

    return re.compile(text)
