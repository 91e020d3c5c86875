"""Test training/start.py: it keeps a launcher, here a fake one, and restarts it if it is killed."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.training.launching import until
from tests.waiting import PATIENCE_S
from training import start

# Writes how often it was started and that it is alive, then runs the file `does`.
PLAYED = """
import os, pathlib, signal, subprocess, sys, time
here = pathlib.Path(sys.argv[1])
number = len(list(here.glob("start.*")))
signals = []
signal.signal(signal.SIGUSR1, lambda *_: signals.append(1))
(here / f"start.{number}").write_text(str(os.getpid()))
exec((here / "does").read_text())
"""


class PlayedLauncher:
    """A checkout with a played launcher, and start.py running in it."""

    def __init__(self, place: Path) -> None:
        self.place = place
        (place / "training" / "launch").mkdir(parents=True)
        (place / "training" / "__init__.py").touch()
        shutil.copy(start.__file__, place / "training")
        (place / "training" / "launch" / "__main__.py").write_text(PLAYED)

    def start(self, does: str) -> subprocess.Popen[bytes]:
        (self.place / "does").write_text(does)
        command = [sys.executable, self.place / "training" / "start.py", self.place]
        return subprocess.Popen(command, stderr=subprocess.DEVNULL)

    def code(self, does: str) -> int:
        return self.start(does).wait(PATIENCE_S)

    def pid(self, number: int) -> int:
        """Return the pid of the launcher's n-th start."""
        path = self.place / f"start.{number}"
        return int(until(lambda: path.exists() and path.read_text()))

    @property
    def starts(self) -> int:
        return len(list(self.place.glob("start.*")))


@pytest.fixture
def played(tmp_path: Path) -> PlayedLauncher:
    return PlayedLauncher(tmp_path)


@pytest.mark.parametrize("code", [0, 1, 75, 137])
def test_the_exit_code_of_the_launcher_counts(played: PlayedLauncher, code: int) -> None:
    assert played.code(f"sys.exit({code})") == code
    assert played.starts == 1


def test_a_killed_launcher_is_restarted_and_its_processes_ended(played: PlayedLauncher) -> None:
    left = "if not number: subprocess.Popen(['sleep', '1000'], start_new_session=True); "
    keeper = played.start(f"{left}\nwhile number < 2: time.sleep(0.01)\nsys.exit(75)")
    sleeper = until(lambda: psutil.Process(played.pid(0)).children())[0]
    for number in range(2):
        os.kill(played.pid(number), signal.SIGKILL)
    assert keeper.wait(PATIENCE_S) == 75
    assert not sleeper.is_running()


def test_not_for_ever(played: PlayedLauncher) -> None:
    assert played.code("os.kill(os.getpid(), signal.SIGSEGV)") == 128 + signal.SIGSEGV
    assert played.starts == start.MAX_STARTS


def test_signals_are_passed_on(played: PlayedLauncher) -> None:
    keeper = played.start("while not signals: time.sleep(0.01)\nsys.exit(75)")
    played.pid(0)
    keeper.send_signal(signal.SIGUSR1)
    assert keeper.wait(PATIENCE_S) == 75


def test_a_launcher_that_was_to_stop_is_not_restarted(played: PlayedLauncher) -> None:
    keeper = played.start("while not signals: time.sleep(0.01)\nos.kill(os.getpid(), signal.SIGKILL)")
    played.pid(0)
    keeper.send_signal(signal.SIGUSR1)
    assert keeper.wait(PATIENCE_S) == 128 + signal.SIGKILL
    assert played.starts == 1


@pytest.mark.lengthy
def test_it_does_not_outlive_its_keeper(played: PlayedLauncher) -> None:
    keeper = played.start("while True: time.sleep(0.01)")
    launcher = psutil.Process(played.pid(0))
    keeper.kill()
    keeper.wait(PATIENCE_S)
    launcher.wait(PATIENCE_S)
