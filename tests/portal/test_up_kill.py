"""Test kill -9 of each part during a real job: training continues, no point is lost or doubled, nothing is left."""

from __future__ import annotations

import csv
import os
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

import httpx
import psutil
import pytest

from tests import steady
from tests.points import points_of
from tests.postgres import postgres
from tests.stack import Stack
from tests.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.sampled(2)]

KILLS = int(os.environ.get("TEST_KILLS", "1"))  # of each kind, all in one job; test-all and soak take more
BETWEEN = 50  # steps from one kill to the next
MOMENTS = range(30, 30 + BETWEEN * KILLS, BETWEEN)
STEPS = 400
# For jobs that are cancelled after the last kill, however long the kills take.
NO_END = 1_000_000
# For the rank that is killed: it is started again by the launcher, from the trainer's own checkpoint.
TRAINED: dict[str, Any] = {
    "name": "killed",
    "resources": {"ranks_per_node": 2, "time_limit": "00:30:00"},
    "run": {
        "recipe": "language",
        "global_batch": 4,
        "checkpoint_every": 100,
        "validate_every": 150,
        "validation_batches": 1,
        "flush_seconds": 0.2,
        "flush_steps": 5,
        "language": {"layers": 1, "heads": 2, "head_width": 16, "context": 64},
    },
}


@pytest.fixture(scope="module")
def home_of_all(prepared_home: Any) -> Iterator[Stack]:
    stack = Stack(prepared_home, VIGIL_LOCAL_CPUS="4")
    yield stack
    stack.close()


@pytest.fixture
def stack(home_of_all: Stack) -> Stack:
    """Provide one portal for all kills: its `vigil up` repairs what one test breaks before the next."""
    if not home_of_all.is_running:
        home_of_all.start()
    return home_of_all


class Submit(Protocol):
    def __call__(self, steps: int = STEPS, *, trained: bool = False) -> int: ...


@pytest.fixture
def submit(stack: Stack) -> Submit:
    return lambda steps=STEPS, *, trained=False: submit_to(stack, steps, trained=trained)


def submit_to(stack: Stack, steps: int = STEPS, *, trained: bool = False) -> int:
    """Submit a job with two ranks."""
    restart = {"max_restarts": KILLS + 1}
    if trained:
        options = {"json": {"spec": {**TRAINED, "restart": restart, "run": {**TRAINED["run"], "steps": steps}}}}
    else:
        options = steady.upload(steady.spec(steps, restart=restart))
    with stack.client() as client:
        answer = client.post("/api/v1/jobs", **options)
    assert answer.status_code == 201, answer.text
    return int(answer.json()["id"])


def job_of(stack: Stack, job_id: int) -> dict[str, Any]:
    """Return the job over REST; retry while the portal is starting."""

    def poll() -> dict[str, Any] | None:
        try:
            with stack.client() as client:
                answer = client.get(f"/api/v1/jobs/{job_id}")
        except httpx.TransportError:
            return None
        assert answer.status_code < 500, answer.text
        return dict(answer.json())

    return until(poll, "the API to answer", seconds=240) or {}  # a new process may first migrate the database


def step_of(stack: Stack, job_id: int) -> int:
    job = job_of(stack, job_id)
    assert job["state"] in {"pending", "running"}, job
    return job["progress"]["step"] or 0


def wait_for_step(stack: Stack, job_id: int, step: int) -> None:
    until(lambda: step_of(stack, job_id) >= step, f"job {job_id} to reach step {step}", seconds=180)


def wait_for_end(stack: Stack, job_id: int) -> dict[str, Any]:
    return until(
        lambda: (job := job_of(stack, job_id))["state"] not in {"pending", "running", "completing"} and job,
        f"job {job_id} to end",
    ) or {}  # fmt: skip


def cancel(stack: Stack, job_id: int, after: int = MOMENTS[-1] + 2 * BETWEEN) -> None:
    """Cancel the job once it has made steps since the last kill, and wait for its end."""
    wait_for_step(stack, job_id, after)
    with stack.client() as client:
        assert client.post(f"/api/v1/jobs/{job_id}/cancel").status_code == 202
    job = wait_for_end(stack, job_id)
    assert job["state"] == "cancelled", job
    assert job["attempt"]["number"] == 1, "training did not notice"


def check(stack: Stack, job_id: int, *, closes: bool = True) -> None:
    """Check that every identity exists once, the line of record is complete, and no process of the job is left.

    `closes`: every stream ended in order, so the attempt is closed at once. Otherwise it stays open for ten minutes.
    """
    until(lambda: job_of(stack, job_id)["over"], f"job {job_id} to be decided")
    # The sweep reads what the shipper had not posted; the attempt is closed after that.
    until(
        lambda: (found := points_of(stack, job_id)).closed or (not closes and found.spooled == found.stored),
        f"job {job_id} to be taken in",
    )  # fmt: skip
    # The final checkpoint's event is stored after the points before it; an attempt that stays open may get both later.
    points = until(
        lambda: (found := points_of(stack, job_id)).record("loss")[-1:] == [last_of(stack, job_id)] and found,
        "the final checkpoint and all points before it to be listed",
    )  # fmt: skip
    assert points
    points.check_exactly_once()
    every = list(range(1, last_of(stack, job_id) + 1))
    assert points.record("loss") == every
    assert points.record("loss", rank=1) == every
    assert steps_of(stack, job_id) == every, "the API's line of record has each step once"
    until(lambda: not stack.job_processes(), "the job's processes to end")


def last_of(stack: Stack, job_id: int) -> int:
    """Return the step of the final checkpoint."""
    with stack.client() as client:
        answer = client.get(f"/api/v1/jobs/{job_id}/checkpoints")
    assert answer.status_code == 200, answer.text
    return int(answer.json()["items"][0]["step"])


def steps_of(stack: Stack, job_id: int) -> list[int]:
    with stack.client() as client:
        answer = client.get(f"/api/v1/jobs/{job_id}/series.csv", params={"name": "loss"})
    assert answer.status_code == 200, answer.text
    return [int(row["step"]) for row in csv.DictReader(answer.text.splitlines())]


@pytest.mark.sampled(1)  # always
def test_killed_parts_cost_nothing(stack: Stack, submit: Submit) -> None:
    job_id, step = submit(NO_END), BETWEEN
    for _ in range(KILLS):
        for name in ("web", "follow", "work", "diagnose", "beat", "redis", "agent"):
            wait_for_step(stack, job_id, step)
            stack.wait_for_new(name, stack.kill(name))
            step = step_of(stack, job_id) + BETWEEN
    cancel(stack, job_id, after=step)
    check(stack, job_id)


def test_telemetry_is_taken_once_whatever_is_killed(stack: Stack) -> None:
    """An agent by the contract continues to post while web is killed repeatedly; answers name where to continue."""
    with stack.client() as client:
        token = client.post("/api/v1/nodes/dgx-99/token").json()["token"]
    start, batches, seq, killed = int(time.time()) // 10 * 10 - 6_000, 240, 0, 0
    stream = os.urandom(8).hex()
    while seq < batches:
        if seq >= 60 * (killed + 1):
            stack.kill("web")
            killed += 1
        sent = [
            {"at": start + 10 * i, "n": 10, "gpus": ["GPU-9"], "columns": {"watts": [[i] * 10]}}
            for i in range(seq, seq + 3)
        ]
        post = {"version": 1, "stream": stream, "first": seq, "boot_id": "b", "sent_at": time.time(), "batches": sent}
        with suppress(httpx.HTTPError):
            address = f"{stack.url}/api/v1/nodes/dgx-99/telemetry"
            answer = httpx.post(
                address, json=post, headers={"Authorization": f"Bearer {token}"}, timeout=20, trust_env=False
            )
            seq = answer.json()["next"] if answer.status_code == 200 else seq
    options = {"name": "watts", "from": start, "to": start + 10 * batches, "points": 10_000}
    with stack.client() as client:
        (line,) = client.get("/api/v1/nodes/dgx-99/series", params=options).json()["items"]
    assert line["step"] == list(range(start, start + 10 * batches))
    assert line["value"] == [i // 10 for i in range(10 * batches)]


def test_killed_supervisor_costs_nothing(stack: Stack, submit: Submit) -> None:
    job_id = submit()
    wait_for_step(stack, job_id, 30)
    stack.kill("up")
    assert stack.process
    stack.process.wait(5)
    until(lambda: not stack.portal_processes(), "the supervisor's children to end", seconds=5)
    assert stack.job_processes(), "only the job goes on"
    # The job ends while the portal is down, and is ingested at the next start.
    until(lambda: not stack.job_processes(), "the job to end by itself")
    stack.start()
    job = wait_for_end(stack, job_id)
    assert job["state"] == "completed", job
    check(stack, job_id)


def test_supervisor_killed_and_started_while_the_job_runs(stack: Stack, submit: Submit) -> None:
    job_id = submit(NO_END)
    for step in MOMENTS:
        wait_for_step(stack, job_id, step)
        stack.kill("up")
        assert stack.process
        stack.process.wait(5)
        stack.start()
    cancel(stack, job_id)
    check(stack, job_id)


def test_killed_rank_is_restarted_in_place(stack: Stack, submit: Submit) -> None:
    job_id = submit(NO_END, trained=True)
    killed: set[int] = set()
    for number, step in enumerate(MOMENTS):
        until(lambda: job_of(stack, job_id)["attempt"]["incarnation"] == number, "word of the new ranks")  # noqa: B023
        wait_for_step(stack, job_id, step)
        rank = until(lambda: new_rank(stack, but=killed), "a rank")
        assert rank
        rank.kill()
        killed.add(rank.pid)
    # Ranks that are stopped before they have caught up save no checkpoint of the last step that was reported.
    until(lambda: incarnations_of(stack, job_id) == set(range(KILLS + 1)), "points of the last ranks")
    wait_for_step(stack, job_id, 1 + max(points_of(stack, job_id).record("loss")))
    cancel(stack, job_id)
    check(stack, job_id, closes=False)


def incarnations_of(stack: Stack, job_id: int) -> set[int]:
    return {incarnation for _, incarnation, rank, _, _ in points_of(stack, job_id).stored if rank >= 0}


def test_killed_shipper_loses_nothing(stack: Stack, submit: Submit) -> None:
    job_id = submit(NO_END)
    killed: set[int] = set()
    for step in MOMENTS:
        wait_for_step(stack, job_id, step)
        shipper = until(lambda: new_shipper(stack, but=killed), "a shipper")
        assert shipper
        shipper.kill()
        killed.add(shipper.pid)
    cancel(stack, job_id)
    check(stack, job_id)


def new_shipper(stack: Stack, *, but: set[int]) -> psutil.Process | None:
    found = [p for p in stack.job_processes() if any("training.shipper" in word for word in p.cmdline())]
    return next((process for process in found if process.pid not in but), None)


def new_rank(stack: Stack, *, but: set[int]) -> psutil.Process | None:
    """Return rank 1, once the killed one has a successor."""
    return next((p for p in stack.job_processes() if p.pid not in but and variable(p, "RANK") == "1"), None)


def variable(process: psutil.Process, name: str) -> str | None:
    """Return a variable of a process's environment; None if it has just ended."""
    try:
        return process.environ().get(name)
    except psutil.NoSuchProcess:
        return None


def test_stopping_leaves_the_job_alone(stack: Stack, submit: Submit) -> None:
    job_id = submit()
    wait_for_step(stack, job_id, 20)
    assert stack.stop() < 5
    assert stack.portal_processes() == []
    assert stack.job_processes()
    stack.start()
    assert wait_for_end(stack, job_id)["state"] == "completed"
    check(stack, job_id)


def test_restored_portal_takes_what_came_after_the_backup(stack: Stack, submit: Submit, tmp_path: Path) -> None:
    job_id, backup = submit(), str(tmp_path / "vigil.tar.gz")
    wait_for_step(stack, job_id, 150)
    assert stack.vigil("backup", backup).returncode == 0
    wait_for_step(stack, job_id, 300)
    stack.stop()
    assert stack.vigil("restore", backup, "--force").returncode == 0
    stack.start()
    assert wait_for_end(stack, job_id)["state"] == "completed"
    check(stack, job_id)


def test_successive_kills_on_postgres() -> None:
    with postgres() as url:
        stack = Stack(DATABASE_URL=url, VIGIL_LOCAL_CPUS="4")
        try:
            stack.start()
            job_id = submit_to(stack)
            for step, name in ((20, "redis"), (120, "web"), (240, "follow")):
                wait_for_step(stack, job_id, step)
                stack.wait_for_new(name, stack.kill(name))
            assert wait_for_end(stack, job_id)["state"] == "completed"
            check(stack, job_id)
        finally:
            stack.close()
