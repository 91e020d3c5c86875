"""Test a complete portal that jobs cannot reach: their points are read from disk, and are still live."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from typing import Any

import pytest
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

from tests import steady
from tests.portal.test_up_kill import steps_of
from tests.stack import Stack
from tests.waiting import until

pytestmark = pytest.mark.slow

ENOUGH = 300  # steps; each read of the disk brings some


def test_charts_are_live_without_a_post(make_stack: Callable[..., Stack]) -> None:
    """A socket hears of a job that cannot post while it runs; how soon is `bench live --tail`."""
    stack = make_stack(VIGIL_REPORTS="tail", VIGIL_REPORT_URL="http://127.0.0.1:9")  # nothing listens there
    stack.start()
    with stack.client() as client:
        job_id = client.post("/api/v1/jobs", **steady.upload(steady.spec(1_000_000))).json()["id"]
        received: list[list[int]] = []
        url = f"{stack.url.replace('http', 'ws', 1)}/ws/jobs/{job_id}?format=json"
        with connect(url, additional_headers=stack.authorization, proxy=None) as socket:
            listener = threading.Thread(target=_listen, args=[socket, received], daemon=True)
            listener.start()

            def job() -> dict[str, Any]:
                return dict(client.get(f"/api/v1/jobs/{job_id}").json())

            until(lambda: sum(map(len, received)) >= ENOUGH, f"{ENOUGH} steps to arrive")
            assert job()["state"] == "running"
            assert client.post(f"/api/v1/jobs/{job_id}/cancel").status_code == 202
            ended = until(lambda: found if (found := job())["over"] else None, "the job to end")
            assert ended is not None
            socket.close()
            listener.join(10)
        assert len(received) > 1, "as it went, not all at once"
    assert steps_of(stack, job_id) == list(range(1, ended["progress"]["step"] + 1))


def _listen(socket: Any, received: list[list[int]]) -> None:
    """The steps of rank 0's losses, message by message."""
    try:
        for message in socket:
            for series in json.loads(message).get("series", ()):
                if series["name"] == "loss" and series["kind"] == "value" and series["rank"] == 0:
                    received.append([int(step) for step in series["step"]])
    except ConnectionClosed:
        return
