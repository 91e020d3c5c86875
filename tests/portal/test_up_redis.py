"""Test an outage of Redis under a running portal: requests do not wait for it, and every queue is consumed again."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import httpx
import pytest

from portal.run import redis
from tests import steady
from tests.stack import REPOSITORY, Stack
from tests.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.sampled(2)]

BOUNCES, WITHIN_S = 10, 15.0
RECOVERED_WITHIN_S = 120.0  # less than 30 on a quiet machine; what is tested is that no worker waits for ever
QUEUES = {"follow": "follow", "work": "work", "diagnose": "diagnose", "send": "diagnose"}
"""Each queue, and the worker that takes from it."""


@pytest.fixture(scope="module")
def stack(prepared_home: Path) -> Iterator[Stack]:
    stack = Stack(prepared_home, VIGIL_LOCAL_CPUS="2", VIGIL_LOCAL_TRUST="everyone")
    try:
        stack.start()
        for worker in QUEUES.values():
            until(lambda w=worker: " ready." in stack.log(w), f"{worker} to be ready")
        yield stack
    finally:
        stack.close()


def submit(stack: Stack) -> int:
    with stack.client() as client:
        answer = client.post("/api/v1/jobs", **steady.upload(steady.spec(1)))
    assert answer.status_code == 201, answer.text
    return int(answer.json()["id"])


def send_to_every_queue(stack: Stack, name: str) -> None:
    """Send a message that names no task: a worker takes it and throws it away, with a word in its log."""
    send = f"import portal.celery as c\nfor q in {list(QUEUES)}: c.app.send_task(f'no.such.{name}.{{q}}', queue=q)"
    environment = {**stack.environment, "DJANGO_SETTINGS_MODULE": "portal.settings"}
    subprocess.run([sys.executable, "-c", send], cwd=REPOSITORY, env=environment, check=True)


def test_every_queue_is_consumed_again_after_ten_bounces(stack: Stack) -> None:
    bounced = threading.Event()

    def load() -> None:
        while not bounced.wait(0.3):
            with suppress(httpx.HTTPError, AssertionError):  # slow or refused is not what is tested here
                submit(stack)

    loading = threading.Thread(target=load)
    loading.start()
    try:
        pid, began = 0, time.monotonic()
        for _ in range(BOUNCES):
            pid = stack.wait_for_new("redis", pid)
            stack.kill("redis")
            time.sleep(0.3)  # workers notice, and try again
        assert time.monotonic() - began < 2 * WITHIN_S, "the supervisor keeps up with it"
    finally:
        bounced.set()
        loading.join()
    last = time.monotonic()
    stack.wait_for_new("redis", pid)
    until(lambda: redis.answers(redis.socket_path(stack.home / "redis")), "Redis")
    send_to_every_queue(stack, "bounced")
    for queue, worker in QUEUES.items():
        left = RECOVERED_WITHIN_S - (time.monotonic() - last)
        until(lambda q=queue, w=worker: f"no.such.bounced.{q}" in stack.log(w), f"{queue} to be consumed", seconds=left)
    assert "Traceback" not in stack.log("beat")
    assert stack.log("beat").count("Redis does not answer") <= BOUNCES


def test_nobody_waits_for_a_redis_that_hangs(stack: Stack) -> None:
    """A stopped server takes commands and never answers; a submission waited for it until its client gave up."""
    stack.wait_for_new("redis", 0)
    pid = stack.kill("redis", signal.SIGSTOP)
    try:
        seconds = []
        for _ in range(3):
            began = time.monotonic()
            submit(stack)
            seconds.append(time.monotonic() - began)
        assert max(seconds) < 8, seconds
        assert min(seconds) < 2, "while it hangs, one request waits for it and not every one"
    finally:
        os.kill(pid, signal.SIGCONT)
