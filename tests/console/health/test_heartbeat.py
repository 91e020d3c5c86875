"""Test heartbeats: what counts as one, which process is killed, and which must not be."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from portal.run import heartbeat
from portal.run.heartbeat import FILE, Pulse, Watch
from tests.stack import REPOSITORY
from tests.waiting import until


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


@pytest.fixture
def pulse() -> Pulse:
    return Pulse("")


@pytest.fixture
def stall(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Pretend that the main thread uses no CPU time from now on."""
    return lambda: monkeypatch.setattr(time, "clock_gettime", lambda clock: 5.0)


def test_a_thread_that_runs_shows_life_and_one_that_hangs_does_not(
    clock: list[float], pulse: Pulse, stall: Callable[[], None]
) -> None:
    assert pulse.is_alive_by_progress()
    stall()
    assert pulse.is_alive_by_progress(), "its first look"
    clock[0] += heartbeat.IDLE_S - 1
    assert pulse.is_alive_by_progress(), "an idle worker wakes up every twenty seconds"
    clock[0] += 2
    assert not pulse.is_alive_by_progress()


def test_a_long_task_is_not_taken_for_a_hang(clock: list[float], pulse: Pulse, stall: Callable[[], None]) -> None:
    """A task may compute or read for many minutes, or wait for a long statement of the database."""
    pulse.begin("jobs.tasks.verify")
    for _ in range(25):
        clock[0] += 60
        sum(range(1000))
        assert pulse.is_alive_by_progress(), "it uses CPU time"
    stall()
    pulse.is_alive_by_progress()
    clock[0] += heartbeat.CALL_S - 1
    assert pulse.is_alive_by_progress()
    clock[0] += 2
    assert not pulse.is_alive_by_progress(), "in one call for five minutes"


def test_no_task_is_longer_than_half_an_hour(clock: list[float], pulse: Pulse) -> None:
    pulse.begin("jobs.tasks.verify")
    clock[0] += heartbeat.TASK_S + 1
    sum(range(1000))
    assert not pulse.is_alive_by_progress(), "it turns in a circle"
    pulse.end()
    assert pulse.is_alive_by_progress()


def test_a_watcher_forgives_its_pauses_and_a_slow_start(clock: list[float], tmp_path: Path) -> None:
    watch = Watch(60.0, tmp_path / "beat")
    watch.restart()
    for _ in range(100):
        clock[0] += 1
        assert not watch.is_over(), "it is still starting"
    heartbeat.touch(str(tmp_path / "beat"))
    assert watch.silent_s() == 0
    clock[0] += 3600
    assert not watch.is_over(), "the machine slept"
    for _ in range(60):
        clock[0] += 1
        over = watch.is_over()
    assert not over
    clock[0] += 1
    assert watch.is_over()
    watch.restart()
    assert not watch.is_over()


def watched(*command: str, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "portal.run.watched", *command], cwd=REPOSITORY, text=True,
        env={**os.environ, **environment}, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


PULSE = (
    "import sys, time; from portal.run.heartbeat import Pulse; Pulse().start(); print('on', flush=True)\n"
    "while True: time.sleep(0.2)"
)


@pytest.mark.slow
def test_a_stopped_service_is_killed_by_its_watcher(tmp_path: Path) -> None:
    environment = {"VIGIL_HOME": str(tmp_path), "VIGIL_UNRESPONSIVE_SECONDS": "5"}
    with watched(sys.executable, "-c", PULSE, **environment) as watcher:
        assert watcher.stdout
        assert watcher.stdout.readline() == "on\n"
        (service,) = psutil.Process(watcher.pid).children()
        beat = Path(service.environ()[FILE])
        first = until(lambda: beat.exists() and beat.stat().st_mtime_ns, "its first beat")
        until(lambda: beat.stat().st_mtime_ns > first, "its second beat")
        service.suspend()
        assert watcher.wait(60) == 1
        assert watcher.stderr
        assert "did not respond for 5 s" in watcher.stderr.read()
        until(lambda: not service.is_running(), "the service to be gone")


def test_a_watcher_ends_as_its_service_does_and_passes_signals_on(tmp_path: Path) -> None:
    with watched(sys.executable, "-c", "raise SystemExit(7)", VIGIL_HOME=str(tmp_path)) as watcher:
        assert watcher.wait(60) == 7
    with watched(sys.executable, "-c", PULSE, VIGIL_HOME=str(tmp_path)) as watcher:
        assert watcher.stdout
        watcher.stdout.readline()
        watcher.terminate()
        assert watcher.wait(60) == 128 + signal.SIGTERM
