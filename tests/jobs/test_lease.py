"""Test the lease: its fencing number rises, and a follower that was stopped past its lease writes nothing."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest
from django.utils import timezone

from jobs import lease
from portal.models import Lease

REPOSITORY = Path(__file__).parents[2]


@pytest.mark.slow
def test_sigstop_past_the_lease(prepared_home: Path, tmp_path: Path) -> None:
    home = shutil.copytree(prepared_home, tmp_path / "home")
    environment = {**os.environ, "VIGIL_HOME": str(home)}
    environment.pop("DATABASE_URL", None)

    def start(word: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "tests.jobs.one_tick", word]
        pipe = subprocess.PIPE
        return subprocess.Popen(command, cwd=REPOSITORY, env=environment, stdin=pipe, stdout=pipe, text=True)

    def run(word: str) -> str:
        with start(word) as process:
            return process.communicate("go on\n", timeout=60)[0]

    run("make")
    with start("tick") as follower:
        assert follower.stdout is not None
        assert follower.stdout.readline() == "waiting\n"
        os.kill(follower.pid, signal.SIGSTOP)
        run("take")  # as soon as the lease is over, by the database's clock
        os.kill(follower.pid, signal.SIGCONT)
        follower.communicate("go on\n", timeout=60)
        assert follower.returncode == 0
    assert run("show") == "pending\n"
    run("tick")  # with the lease the same tick writes
    assert run("show") == "running\n"


@pytest.mark.django_db
def test_the_fence_rises() -> None:
    first = lease.take("x")
    assert first is not None
    first.release()
    second = lease.take("x")
    assert second is not None
    assert second.fence == first.fence + 1
    with pytest.raises(lease.LeaseLost), first.writing():
        pass
    with second.writing():
        pass


@pytest.mark.django_db
def test_a_clock_that_is_set_back_leaves_nobody_waiting() -> None:
    """Earlier leases seem to be taken for as long as the clock went back."""
    first = lease.take("x")
    assert first is not None
    assert lease.take("x") is None
    Lease.objects.update(expires_at=timezone.now() + timedelta(minutes=10))
    second = lease.take("x")
    assert second is not None
    assert second.fence == first.fence + 1
    with pytest.raises(lease.LeaseLost), first.writing():
        pass
