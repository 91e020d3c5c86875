"""Test kill -STOP of each part of a running portal: /readyz reports it, the supervisor restarts it, work continues."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.stack import Stack
from tests.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.sampled(4)]  # they wait for a minute each

LIMIT_S = 45
"""Longer than the 30 s after which /readyz misses a process, so that both become visible."""


def readyz(stack: Stack) -> dict[str, Any]:
    with suppress(httpx.TransportError):
        answer = httpx.get(f"{stack.url}/readyz", trust_env=False, timeout=20)
        payload = dict(answer.json())
        assert answer.status_code == (200 if payload["ready"] else 503)
        return payload
    return {"ready": False, "errors": []}


def codes(stack: Stack) -> set[str]:
    return {error["code"] for error in readyz(stack)["errors"]}


@pytest.fixture(scope="module")
def stack(prepared_home: Path) -> Iterator[Stack]:
    stack = Stack(prepared_home, VIGIL_UNRESPONSIVE_SECONDS=str(LIMIT_S))
    try:
        stack.start()
        until(lambda: readyz(stack)["ready"], "the portal to be ready")
        yield stack
    finally:
        stack.close()


def test_every_part_that_hangs_is_missed_and_restarted(stack: Stack) -> None:
    """The test hangs all parts but web at once; beat is not named, as no worker is left to take its ticks."""
    names = ("follow", "work", "diagnose", "beat", "redis")
    pids = {name: stack.kill(name, signal.SIGSTOP) for name in names}
    try:
        assert httpx.get(f"{stack.url}/healthz", trust_env=False).status_code == 200, "web itself answers"
        until(lambda: "redis" in codes(stack), "/readyz to miss Redis")
        workers = {"worker.follow", "worker.work", "worker.diagnose"}
        until(lambda: workers <= codes(stack), f"/readyz to miss {workers}")
        for name in names:
            stack.wait_for_new(name, pids[name], 90)
    finally:
        for pid in pids.values():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
    for name in names:
        assert f"{name} did not respond for {LIMIT_S} s and is killed" in stack.output_of()
    until(lambda: readyz(stack)["ready"], "the portal to be ready again")


def test_web_that_hangs_is_restarted(stack: Stack) -> None:
    until(lambda: readyz(stack)["ready"], "the portal to be ready")
    before = stack.output_of().count("did not respond for")
    pid = stack.kill("web", signal.SIGSTOP)
    stack.wait_for_new("web", pid, 90)
    assert httpx.get(f"{stack.url}/healthz", trust_env=False, timeout=30).status_code == 200
    assert stack.output_of().count("did not respond for") == before + 1, "nobody else was killed"
