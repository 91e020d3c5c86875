"""Test `vigil attach` on a real Slurm: following jobs that alice and bob start with sbatch."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.slurm.cluster import Cluster
from tests.slurm.people import ALICE, BOB
from tests.slurm.portal import Person, Portal
from tests.stack import REPOSITORY
from tests.waiting import until

VIGIL = f"{sys.executable} -P -m vigil_cli.main"
# Logs until it is told to end, from the step after the checkpoint that it finds.
TRAIN = """\
import os, pathlib, time, vigil_report
found, step = vigil_report.resume_path(), 0
if found:
    step = int(found.read_text())
pathlib.Path(f"from.{os.environ.get('SLURM_RESTART_COUNT', 0)}").write_text(str(step))
while not pathlib.Path("go").exists() or step < 10:
    step += 1
    vigil_report.log(step, loss=1 / step)
    if step == 5:
        pathlib.Path("model.txt").write_text("5")
        vigil_report.checkpoint("model.txt", 5)
    time.sleep(0.05)
pathlib.Path(f"done.{os.environ['SLURM_PROCID']}").write_text(str(step))
"""


class LoginNode:
    """Alice's shell on a login node: a folder that all nodes share, sbatch, and `vigil` with her token."""

    def __init__(self, portal: Portal, slurm: Cluster, folder: Path) -> None:
        self.portal, self.slurm, self.folder = portal, slurm, folder
        folder.mkdir()
        folder.chmod(0o777)
        (folder / "train.py").write_text(TRAIN)

    def sbatch(self, command: str, *options: str) -> str:
        lines = [
            "#!/bin/bash",
            f"export PYTHONPATH={REPOSITORY} VIGIL_HOME=/nonexistent",
            f"export VIGIL_URL={self.portal.url} VIGIL_TOKEN={self.portal.secret_of('alice')}",
            command,
        ]
        words = (
            "sbatch",
            "--parsable",
            "--time=5",
            f"--output={self.folder}/out.%j",
            f"--chdir={self.folder}",
            *options,
        )
        return self.slurm.run(*words, user=ALICE, stdin="\n".join(lines)).strip()

    def vigil(self, *words: str, name: str = "alice") -> subprocess.CompletedProcess[str]:
        variables = {
            "VIGIL_URL": self.portal.url,
            "VIGIL_TOKEN": self.portal.secret_of(name),
            "PYTHONPATH": str(REPOSITORY),
        }
        return subprocess.run(
            [*VIGIL.split(), *words], env={**os.environ, **variables}, cwd=self.folder, capture_output=True, text=True,
            check=False, timeout=60,
        )  # fmt: skip

    def go(self) -> None:
        (self.folder / "go").touch()


@pytest.fixture
def login_node(portal: Portal, slurm: Cluster) -> Iterator[LoginNode]:
    created = LoginNode(portal, slurm, slurm.layout.scratch / f"login_node-{secrets.token_hex(6)}")
    yield created
    slurm.run("scancel", f"--user={ALICE}")


def attached(person: Person, scheduler_id: str) -> int:
    """Return the number of the job that follows it, once there is one."""

    def poll() -> int | None:
        jobs = person.client.get("/jobs", params={"kind": "attached"}).json()["items"]
        return next((job["id"] for job in jobs if job["attempt"]["scheduler_id"] == scheduler_id), None)

    found = until(poll, f"Slurm's job {scheduler_id} to be attached")
    assert found is not None
    return found


def steps_of(person: Person, job_id: int, rank: int) -> list[int]:
    query: dict[str, Any] = {"name": "loss", "rank": rank, "points": 20_000}
    items = person.client.get(f"/jobs/{job_id}/series", params=query).json()["items"]
    return list(items[0]["step"]) if items else []


def test_it_shows_live_with_what_all_its_ranks_report(login_node: LoginNode, alice: Person) -> None:
    options = ("--nodes=2", "--ntasks-per-node=1", "--gres=gpu:2", "--job-name=plain")
    slurm_id = login_node.sbatch(f"{VIGIL} attach --tag mine -- srun {sys.executable} train.py", *options)
    job_id = attached(alice, slurm_id)
    alice.wait_for_step(job_id, 20)
    live = alice.wait(job_id, "running")
    assert len(live["attempt"]["nodes"]) == 2
    report = until(lambda: alice.job(job_id)["spec"].get("resources"), "what it requests according to Slurm")
    assert (report["nodes"], report["gpus_per_node"], report["partition"], report["time_limit"]) == (
        2,
        2,
        "batch",
        "00:05:00",
    )
    assert (alice.job(job_id)["name"], live["tags"], live["project"]) == ("plain", ["mine"], "vision")
    login_node.go()
    done = alice.wait(job_id)
    assert (done["state"], done["attempt"]["cause"], done["attempt"]["exit_code"]) == ("completed", "completed", 0)
    for rank in (0, 1):
        last = int((login_node.folder / f"done.{rank}").read_text())
        assert steps_of(alice, job_id, rank) == list(range(1, last + 1))
    out = (login_node.folder / f"out.{slurm_id}").read_text()
    assert out == f"vigil: this run is #{job_id}: {done['url']}\n"
    until(lambda: alice.attempts(job_id)[0]["slurm_steps"], "how its steps ended")


def test_a_failure_is_the_command_s(login_node: LoginNode, alice: Person) -> None:
    slurm_id = login_node.sbatch(f"exec {VIGIL} attach -- srun {sys.executable} -c 'raise SystemExit(3)'")
    done = alice.wait(attached(alice, slurm_id))
    assert (done["state"], done["attempt"]["exit_code"]) == ("failed", 3)
    assert "Vigil did not submit it" in until(lambda: alice.job(done["id"])["attempt"]["decision"], "the decision")


def test_cancelled_in_vigil_it_is_cancelled_in_slurm(login_node: LoginNode, alice: Person) -> None:
    slurm_id = login_node.sbatch(f"{VIGIL} attach -- srun {sys.executable} train.py")
    job_id = attached(alice, slurm_id)
    alice.wait_for_step(job_id, 5)
    alice.cancel(job_id)
    done = alice.wait(job_id)
    assert (done["state"], login_node.slurm.state(slurm_id)) == ("cancelled", "CANCELLED")


def test_a_job_that_runs_or_waits_is_attached_by_its_number(login_node: LoginNode, alice: Person) -> None:
    for options, state in ((("--job-name=late",), "running"), (("--begin=now+1hour",), "pending")):
        slurm_id = login_node.sbatch(f"srun {sys.executable} train.py", *options)
        done = login_node.vigil("attach", slurm_id)
        assert (done.returncode, done.stderr) == (0, "")
        job_id = attached(alice, slurm_id)
        assert done.stdout.startswith(f"Slurm job {slurm_id} is now tracked as #{job_id} ")
        assert login_node.vigil("attach", slurm_id).stdout.split("#")[1].split()[0] == str(job_id), "the same again"
        alice.wait(job_id, state)
    assert "BeginTime" in until(lambda: alice.job(job_id)["reason"], "the reason")
    assert "cheduled to start" in alice.client.get(f"/jobs/{job_id}/why").json()["text"]
    alice.cancel(job_id)
    assert alice.wait(job_id)["state"] == "cancelled"


def test_tasks_of_an_array_are_separate_jobs(login_node: LoginNode, alice: Person) -> None:
    """The last one to start gets the array's own number from Slurm."""
    array = login_node.sbatch(f"{VIGIL} attach -- srun {sys.executable} train.py", "--array=0-1")
    jobs = [attached(alice, f"{array}_{task}") for task in (0, 1)]
    for job_id in jobs:
        alice.wait_for_step(job_id, 10)
    login_node.slurm.run(
        "scancel", f"{array}_1", user=ALICE
    )  # without Vigil; except over the REST API of 22.05, only root may
    assert alice.wait(jobs[1])["state"] == "cancelled"
    assert alice.job(jobs[0])["state"] == "running"
    login_node.go()
    assert alice.wait(jobs[0])["state"] == "completed"


def test_jobs_of_vigil_are_not_attached(login_node: LoginNode, alice: Person) -> None:
    resources = {"nodes": 1, "begin": "+2h", "time_limit": "00:05:00"}
    job_id = alice.submit({"name": "own", "project": "vision", "resources": resources, "run": {"recipe": "language"}})
    slurm_id = until(lambda: alice.job(job_id)["attempt"]["scheduler_id"], "Slurm to have it")
    done = login_node.vigil("attach", slurm_id)
    assert (done.returncode, f"{slurm_id} was submitted by Vigil as #{job_id}" in done.stderr) == (1, True)
    alice.cancel(job_id)
    alice.wait(job_id)


def test_nobody_attaches_another_s(login_node: LoginNode, bob: Person) -> None:
    slurm_id = login_node.sbatch("sleep 60")
    for number in (slurm_id, "999999"):
        done = login_node.vigil("attach", number, name="bob")
        assert done.returncode == 1
        assert f"Slurm has no job {number} of yours." in done.stderr
    assert login_node.slurm.state(slurm_id) in {"RUNNING", "PENDING"}
    items = bob.client.get("/jobs", params={"owner": "bob"}).json()["items"]
    assert {job["state"] for job in items} == {"failed"}
    assert login_node.slurm.run("squeue", "--noheader", f"--user={BOB}").strip() == ""


def test_requeued_by_slurm_it_is_the_next_attempt(login_node: LoginNode, alice: Person) -> None:
    slurm_id = login_node.sbatch(f"{VIGIL} attach -- srun {sys.executable} train.py", "--requeue")
    job_id = attached(alice, slurm_id)
    alice.wait_for_step(job_id, 10)
    login_node.slurm.run("scontrol", "requeue", slurm_id, user=ALICE)
    until(lambda: len(alice.attempts(job_id)) == 2, "a second attempt")
    login_node.slurm.run("scontrol", "update", f"JobId={slurm_id}", "StartTime=now", user=ALICE)
    login_node.go()
    alice.wait(job_id, "completed")
    first, second = alice.attempts(job_id)
    assert (second["number"], second["scheduler_id"], first["state"]) == (2, first["scheduler_id"], "requeued")
    assert [(login_node.folder / f"from.{count}").read_text() for count in (0, 1)] == ["0", "5"], (
        "from its own checkpoint"
    )
    assert (first["step"] >= 10, second["step"]) == (True, 10)
    assert steps_of(alice, job_id, 0)[:10] == list(range(1, 11))
    assert alice.checkpoints(job_id) == [], "Vigil does not manage them"


def test_a_portal_that_is_away_hears_all_of_it_later(login_node: LoginNode, portal: Portal, alice: Person) -> None:
    portal.stop()
    try:
        slurm_id = login_node.sbatch(f"{VIGIL} attach -- srun {sys.executable} train.py")
        spools = login_node.folder / ".vigil" / slurm_id / "job" / "attempt-1" / "spool"
        until(lambda: spools.is_dir() and any(spool.stat().st_size > 2000 for spool in spools.iterdir()), "reports")
    finally:
        portal.start()
    job_id = attached(alice, slurm_id)
    alice.wait_for_step(job_id, 20)
    login_node.go()
    done = alice.wait(job_id)
    assert done["state"] == "completed"
    last = int((login_node.folder / "done.0").read_text())
    until(lambda: steps_of(alice, job_id, 0) == list(range(1, last + 1)), "all of it")
    assert "is attached once the portal answers" in (login_node.folder / f"out.{slurm_id}").read_text()
