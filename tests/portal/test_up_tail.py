"""A whole portal whose jobs cannot reach it: their points come off the disk, live all the same."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

from tests import steady
from tests.stack import Stack, wait_for

pytestmark = pytest.mark.slow

LIVE_S = 5.0


def test_charts_are_live_without_a_post(make_stack: Callable[..., Stack]) -> None:
    """Of the points that a socket got while the job ran, all but a few were there within five seconds."""
    stack = make_stack(VIGIL_REPORTS="tail", VIGIL_REPORT_URL="http://127.0.0.1:9")  # nothing listens there
    stack.start()
    with stack.client() as client:
        job_id = client.post("/api/v1/jobs", **steady.upload(steady.spec(600))).json()["id"]
        arrived: dict[int, float] = {}
        url = f"{stack.url.replace('http', 'ws', 1)}/ws/jobs/{job_id}?format=json"
        with connect(url, additional_headers=stack.authorization, proxy=None) as socket:
            listener = threading.Thread(target=_listen, args=[socket, arrived], daemon=True)
            listener.start()

            def job() -> dict[str, Any]:
                return dict(client.get(f"/api/v1/jobs/{job_id}").json())

            ended = wait_for(lambda: job() if job()["over"] else None, "the job to end", 120.0)
            assert ended is not None
            assert (ended["state"], ended["progress"]["step"]) == ("completed", 600)
            socket.close()
            listener.join(10)
        curve = client.get(f"/api/v1/jobs/{job_id}/series", params={"name": "loss", "points": 1000}).json()
        assert curve["items"][0]["step"] == list(range(1, 601))
    spooled = _spooled(stack)
    late = sorted(arrived[step] - spooled[step] for step in arrived)
    assert len(late) > 300
    assert late[int(len(late) * 0.95)] < LIVE_S


def _listen(socket: Any, arrived: dict[int, float]) -> None:
    """When each of rank 0's losses came."""
    try:
        for message in socket:
            now = time.time()
            for series in json.loads(message).get("series", ()):
                if series["name"] == "loss" and series["kind"] == "value" and series["rank"] == 0:
                    for step in series["step"]:
                        arrived.setdefault(int(step), now)
    except ConnectionClosed:
        return


def _spooled(stack: Stack) -> dict[int, float]:
    """When rank 0 wrote each of them."""
    (path,) = stack.home.glob("runs/*/*/job/attempt-1/spool/0.0.*.jsonl")
    times = {}
    for line in path.read_text().splitlines()[1:]:
        batch = json.loads(line)
        times |= {step: batch["time"] for step, _ in batch.get("series", {}).get("loss", [])}
    return times
