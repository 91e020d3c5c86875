"""Test the shipper as a process: it survives kills, outages and signals, and delays nobody at the end."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.training.intake import TOKEN, Server
from tests.training.reporting.shipped import losses, reporter_of
from tests.waiting import PATIENCE_S, until


class Process:
    def __init__(self, attempt: Path, *, drain: float = 10.0) -> None:
        self.log = attempt / "shipper.log"
        arguments = ["-P", "-m", "training.shipper", str(attempt.parent.parent), str(attempt), "--node", "dgx01"]
        with open(self.log, "a") as log:
            self.popen = subprocess.Popen(
                [sys.executable, *arguments, "--drain", str(drain)], stdin=subprocess.PIPE, stderr=log
            )

    def end(self) -> float:
        """Close its stdin and return the seconds until it exited."""
        assert self.popen.stdin is not None
        began = time.monotonic()
        self.popen.stdin.close()
        assert self.popen.wait(PATIENCE_S) == 0
        return time.monotonic() - began


@pytest.mark.slow
def test_the_process_ships_as_it_grows_and_drains_at_the_end(server: Server, attempt: Path) -> None:
    server.leave_token(attempt.parent.parent)
    process = Process(attempt)
    reporter = reporter_of(attempt)
    for step in range(20):
        reporter.log(step, loss=step)
        assert reporter.flush(wait=10)
        until(lambda step=step: len(server.intake.points) > step)  # type: ignore[misc]
    reporter.log(20, loss=20)
    reporter.close()
    process.end()
    assert losses(server) == [(0, step, float(step)) for step in range(21)]
    assert len(server.intake.ended) == 1
    assert TOKEN not in process.log.read_text()


@pytest.mark.slow
def test_kill_and_outage_lose_and_double_nothing(server: Server, attempt: Path) -> None:
    """kill -9 of the shipper in the middle, portal away in the middle; a new shipper and a new portal go on."""
    run_dir = attempt.parent.parent
    server.leave_token(run_dir)
    reporters = [reporter_of(attempt, rank) for rank in range(2)]
    process = Process(attempt)
    for step in range(200):
        for reporter in reporters:
            reporter.log(step, loss=step)
            assert reporter.flush(wait=10)
        if step == 50:
            until(lambda: len(server.intake.points) >= 40)
            process.popen.send_signal(signal.SIGKILL)
            process.popen.communicate()
            process = Process(attempt)
        if step == 100:
            server.stop()
        if step == 150:
            server.start()
    for reporter in reporters:
        reporter.close()
    process.end()
    assert losses(server) == [(rank, step, float(step)) for rank in range(2) for step in range(200)]


@pytest.mark.slow
def test_signals_to_the_whole_job_do_not_end_it(server: Server, attempt: Path) -> None:
    """The launcher starts it with these ignored; here the test does, and the token arrives only afterwards."""
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGTERM, signal.SIGUSR1)}
    try:
        process = Process(attempt)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGTERM):
        os.kill(process.popen.pid, number)
    reporter = reporter_of(attempt)
    reporter.log(0, loss=1.0)
    reporter.close()
    server.leave_token(attempt.parent.parent)
    until(lambda: losses(server) == [(0, 0, 1.0)])
    process.end()


@pytest.mark.slow
def test_without_a_portal_it_does_not_hold_up_the_end(server: Server, attempt: Path) -> None:
    reporter = reporter_of(attempt)
    reporter.log(0, loss=1.0)
    reporter.close()
    assert Process(attempt).end() < 3
    server.leave_token(attempt.parent.parent)
    server.stop()
    assert Process(attempt).end() < 8
    assert Process(attempt, drain=0.5).end() < 3


def test_next_to_a_command_it_outlives_a_signal_to_the_whole_job(server: Server, attempt: Path) -> None:
    server.leave_token(attempt.parent.parent)
    words = [str(attempt.parent.parent), str(attempt), "--every-node"]
    process = subprocess.Popen([sys.executable, "-m", "training.shipper", *words], stdin=subprocess.PIPE)
    try:
        with contextlib.closing(reporter_of(attempt)) as reporter:
            reporter.log(1, loss=0.5)
            until(lambda: server.intake.points)
            process.send_signal(signal.SIGTERM)
            reporter.log(2, loss=0.25)
        assert process.stdin
        process.stdin.close()
        assert process.wait(PATIENCE_S) == 0
    finally:
        process.kill()
        process.wait()
    assert [step for *_, step in server.intake.identities()] == [1, 2]
    assert len(server.intake.ended) == 1
