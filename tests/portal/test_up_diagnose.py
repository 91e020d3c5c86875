"""Test that a verdict comes once: despite kill -9 in the middle, several workers at it, an outage of Redis."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests import planted
from tests.endings import Ending, endings_of
from tests.planted import Planted
from tests.stack import REPOSITORY, Stack
from tests.waiting import until

pytestmark = pytest.mark.slow

# Does as a worker does, again and again; answers how many it diagnosed in so many seconds.
TOGETHER_S = 6
WORKER = f"""
import django, sys, time
django.setup()
from jobs.postmortem import incidents
incidents.warm_up()
print("ready", flush=True)
sys.stdin.readline()
done, until = 0, time.monotonic() + {TOGETHER_S}
while time.monotonic() < until:
    done += incidents.diagnose_due(until)
print(done)
"""
MAKE_DUE = """
import django, sys
django.setup()
from django.utils import timezone
from jobs.models import Incident
print("ready", flush=True)
sys.stdin.readline()
print(Incident.objects.exclude(due_at=None).update(due_at=timezone.now()))
"""


@pytest.fixture(scope="module")
def stack(prepared_home: Path) -> Iterator[Stack]:
    created = Stack(prepared_home, VIGIL_LOCAL_CPUS="4")
    try:
        created.start()
        yield created
    finally:
        created.close()


def submit(stack: Stack, what: Planted) -> int:
    with stack.client() as client:
        answer = client.post("/api/v1/jobs", **planted.upload(what.spec()))
    assert answer.status_code == 201, answer.text
    return int(answer.json()["id"])


def ending(stack: Stack, job: int) -> Ending:
    until(lambda: attempt_of(stack, job)["decided_at"], f"what follows the end of #{job}")
    return endings_of(stack)[job, 1]


def attempt_of(stack: Stack, job: int) -> dict[str, Any]:
    with stack.client() as client:
        return dict(client.get(f"/api/v1/jobs/{job}").json()["attempt"])


def process(stack: Stack, program: str) -> subprocess.Popen[str]:
    """Start a process of this repository with that portal's settings."""
    environment = {**stack.environment, "DJANGO_SETTINGS_MODULE": "portal.settings"}
    return subprocess.Popen(
        stack.command("-c", program), cwd=REPOSITORY, env=environment, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def is_reading(pid: int) -> bool:
    """Return whether the process has a rank's log open."""
    with suppress(psutil.NoSuchProcess):
        return any(file.path.endswith("/0.0.log") for file in psutil.Process(pid).open_files())
    return False


def test_killed_in_its_midst_and_several_at_it_afterwards(stack: Stack) -> None:
    """The decision does not wait for the lost diagnosis; the later one is the only one, whichever worker makes it."""
    job = submit(stack, planted.LONG_LOG)
    until(lambda: is_reading(stack.pid("diagnose")), "it to read the log")
    stack.wait_for_new("diagnose", stack.kill("diagnose"))
    ended = ending(stack, job)
    (incident,) = ended.incidents
    assert (incident.verdicts, ended.decided_version) == ((), 0)
    assert ended.decision.endswith("Decided before the cause was known.")
    stack.kill("diagnose", signal.SIGSTOP)  # so that it is none but ours
    processes = [process(stack, program) for program in (WORKER, WORKER, WORKER, MAKE_DUE)]
    for item in processes:
        assert item.stdout
        assert item.stdout.readline() == "ready\n"
    for item in processes:
        assert item.stdin
        item.stdin.write("go\n")
        item.stdin.flush()
    *done, due = [item.communicate() for item in processes]
    stack.kill("diagnose", signal.SIGCONT)
    assert int(due[0]) == 1, due
    assert sum(int(found) for found, _ in done) == 1, done
    (incident,) = endings_of(stack)[job, 1].incidents
    assert [(verdict.version, verdict.cause) for verdict in incident.verdicts] == [(1, "program.exception")]
    assert endings_of(stack)[job, 1].decision == ended.decision


def test_without_redis_the_next_tick_finds_it(stack: Stack) -> None:
    """The word that it is due is lost with it; the row is not."""
    job = submit(stack, planted.MISSING)
    until(lambda: attempt_of(stack, job)["started_at"], "it to start")
    stack.wait_for_new("redis", stack.kill("redis"))
    ended = ending(stack, job)
    planted.MISSING.check(ended)
    assert ended.decided_version == 1
