"""Test sweeps on a real Slurm: an array of 20, with failed, requeued and cancelled tasks."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from nodes.schedulers.base import SchedulerError, Submission
from nodes.schedulers.slurm.http import SlurmHttp
from nodes.schedulers.slurm.rest import SlurmRest
from nodes.schedulers.slurm.scheduler import Slurm
from nodes.schedulers.slurm.tokens import KeyFileTokens
from tests.jobs.submissions import packed
from tests.slurm.cluster import Cluster
from tests.slurm.people import ALICE, PORTAL
from tests.slurm.portal import Person, Portal
from tests.waiting import until

# Prints its index and when it ran; fails, stops or waits as instructed.
PROGRAM = """\
import json, os, pathlib, sys, time
number, mode = int(os.environ["NUMBER"]), os.environ.get("MODE", "")
run = pathlib.Path(os.environ["VIGIL_RUN_DIR"])
ran = run / "job" / "ran"
times = len(ran.read_text().split()) if ran.exists() else 0
began = time.time()
if mode == "fail" and number == 7 and times == 0:
    ran.write_text(f"{began} ")
    os.kill(os.getpid(), 9)
import vigil_report
vigil_report.log(1, loss=1 / (1 + number))
while mode == "wait" and not (run / "job" / "go").exists():
    time.sleep(0.1)
time.sleep(0.5)
with ran.open("a") as file:
    file.write(f"{began}-{time.time()} ")
"""


def text_of(count: int, *, at_once: int | None = None, mode: str = "", restarts: int = 1) -> str:
    numbers = ", ".join(f'"{n}"' for n in range(count))
    turns = f"at_once = {at_once}\n" if at_once else ""
    return f"""\
name = "numbers"
kind = "script"
project = "vision"
[resources]
time_limit = "00:05:00"
[restart]
max_restarts = {restarts}
in_place = 0
[script]
directory = "."
env = {{ MODE = "{mode}" }}
[sweep]
{turns}[sweep.over]
"script.env.NUMBER" = [{numbers}]
"""


def submit(person: Person, text: str) -> tuple[int, list[int]]:
    """A sweep and its jobs, in order."""
    files = {"code": ("code.tar.gz", packed(train_py=PROGRAM), "application/gzip")}
    answer = person.client.post("/sweeps", data={"spec_toml": text}, files=files)
    assert answer.status_code == 201, answer.text
    sweep_id = int(answer.json()["id"])
    items = person.client.get("/jobs", params={"sweep": sweep_id, "limit": 200, "sort": "created"}).json()["items"]
    return sweep_id, [item["id"] for item in sorted(items, key=lambda item: item["sweep"]["index"])]


def counts(person: Person, sweep_id: int) -> dict[str, int]:
    return dict(person.client.get(f"/sweeps/{sweep_id}").json()["counts"])


def wait_for_end(person: Person, sweep_id: int, timeout_s: float = 180) -> dict[str, int]:
    until(lambda: person.client.get(f"/sweeps/{sweep_id}").json()["over"], "the sweep's end", seconds=timeout_s)
    return counts(person, sweep_id)


def root_of(portal: Portal, job_id: int) -> Path:
    (run,) = (portal.runs / "vision").glob(f"{job_id}-*")
    return run


def test_an_array_of_20_with_a_task_that_fails_once(portal: Portal, slurm: Cluster, alice: Person) -> None:
    before = set(slurm.run("sacct", "-nX", "--allusers", "--format=jobid").split())
    sweep_id, jobs = submit(alice, text_of(20, at_once=4, mode="fail"))
    assert len(jobs) == 20
    assert wait_for_end(alice, sweep_id, 300) == {"completed": 20}
    arrays = set()
    spans = []
    for number, job_id in enumerate(jobs):
        attempts = alice.attempts(job_id)
        assert [attempt["state"] for attempt in attempts] == (["failed", "completed"] if number == 7 else ["completed"])
        array, _, task = attempts[0]["scheduler_id"].partition("_")
        arrays.add(array)
        assert int(task) == number
        run = root_of(portal, job_id)
        written = tomllib.loads((run / "portal" / "run.toml").read_text())
        assert written["script"]["env"]["NUMBER"] == str(number)
        ran = (run / "job" / "ran").read_text().split()
        assert len(ran) == len(attempts)
        if number != 7:
            spans.append(tuple(map(float, ran[0].split("-"))))
        assert alice.losses(job_id) == {1: pytest.approx(1 / (1 + number))}
    assert len(arrays) == 1, "one array"
    assert "_" not in alice.attempts(jobs[7])[1]["scheduler_id"], "its restart is a job of its own"
    moments = sorted({begin for begin, _ in spans})
    assert max(sum(begin <= at <= end for begin, end in spans) for at in moments) <= 4
    after = set(slurm.run("sacct", "-nX", "--allusers", "--format=jobid").split()) - before
    assert len(after) == 21


def test_a_task_that_is_requeued_goes_on_under_its_id(portal: Portal, slurm: Cluster, alice: Person) -> None:
    """The last one to start too, whose own number is the whole array's."""
    sweep_id, jobs = submit(alice, text_of(3, mode="wait"))
    for job_id in jobs:
        alice.wait(job_id, "running")
        until(lambda job_id=job_id: alice.job(job_id)["latest"], "a report")
    for job_id in (jobs[0], jobs[2]):
        slurm.run("scontrol", "requeue", alice.job(job_id)["attempt"]["scheduler_id"])
        until(lambda job_id=job_id: len(alice.attempts(job_id)) == 2, "a second attempt")
    for job_id in jobs:
        (root_of(portal, job_id) / "job" / "go").touch(mode=0o666)
    assert wait_for_end(alice, sweep_id) == {"completed": 3}
    for number, job_id in enumerate(jobs):
        attempts = alice.attempts(job_id)
        assert [attempt["state"] for attempt in attempts] == (
            ["completed"] if number == 1 else ["requeued", "completed"]
        )
        assert len({attempt["scheduler_id"] for attempt in attempts}) == 1
        assert len((root_of(portal, job_id) / "job" / "ran").read_text().split()) == 1
        assert alice.losses(job_id) == {1: pytest.approx(1 / (1 + number))}


def test_cancel_a_waiting_task_a_running_task_then_all(portal: Portal, slurm: Cluster, alice: Person) -> None:
    sweep_id, jobs = submit(alice, text_of(8, at_once=2, mode="wait"))
    alice.wait(jobs[0], "running")
    alice.wait(jobs[1], "running")
    alice.cancel(jobs[5])
    assert alice.wait(jobs[5], timeout_s=40)["state"] == "cancelled"
    alice.cancel(jobs[0])
    assert alice.wait(jobs[0], timeout_s=60)["state"] == "cancelled"
    alice.wait(jobs[2], "running")
    assert alice.job(jobs[1])["state"] == "running", "the others go on"
    answer = alice.client.post(f"/sweeps/{sweep_id}/cancel")
    assert answer.status_code == 202, answer.text
    assert wait_for_end(alice, sweep_id, 90) == {"cancelled": 8}
    assert slurm.run("squeue", "--noheader", f"--user={ALICE}").strip() == ""


def test_cancelling_the_task_with_the_arrays_number_leaves_the_others(
    portal: Portal, slurm: Cluster, alice: Person
) -> None:
    sweep_id, jobs = submit(alice, text_of(3, mode="wait"))
    for job_id in jobs:
        alice.wait(job_id, "running")
    array = alice.job(jobs[0])["attempt"]["scheduler_id"].partition("_")[0]
    rows = dict(row.split() for row in slurm.run("squeue", "-h", f"--user={ALICE}", "--format=%A %K").splitlines())
    leader = int(rows[array])
    alice.cancel(jobs[leader])
    assert alice.wait(jobs[leader], timeout_s=90)["state"] == "cancelled"
    for number, job_id in enumerate(jobs):
        assert number == leader or alice.job(job_id)["state"] == "running"
        (root_of(portal, job_id) / "job" / "go").touch(mode=0o666)
    assert wait_for_end(alice, sweep_id) == {"cancelled": 1, "completed": 2}


def test_too_many_for_slurm_names_its_limit(slurm: Cluster) -> None:
    tokens = KeyFileTokens(slurm.layout.jwt_key)
    http = SlurmHttp(slurm.url, tokens=tokens, user=PORTAL)
    script = slurm.layout.scratch / "array.sh"
    script.write_text("#!/bin/bash\ntrue\n")
    submission = Submission(
        key="ab" * 8, name="many", user=ALICE, script=str(script), directory="/tmp", output="/dev/null",
        time_limit_s=60, grace_s=30,
    )  # fmt: skip
    with pytest.raises(SchedulerError, match="no array of 10,002 jobs: its MaxArraySize") as caught:
        Slurm(SlurmRest(http), tokens=tokens, user=PORTAL).submit_array(submission, [0, 10_001], at_once=None)
    assert caught.value.permanent
    http.close()
