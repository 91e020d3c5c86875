"""Test the whole of Vigil on a real Slurm: jobs of two people, submitted, followed, stopped, lost and resumed."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from jobs.spec import STOP_SECONDS
from tests import planted
from tests.slurm.cluster import Cluster
from tests.slurm.launchers import is_launcher, launcher_parent, processes_on_node
from tests.slurm.people import ALICE, PORTAL
from tests.slurm.portal import Person, Portal, federated, language, script
from tests.stack import REPOSITORY
from tests.waiting import until

pytestmark = pytest.mark.sampled(2)


@pytest.mark.sampled(1)  # always
def test_two_nodes_train_over_gloo_and_go_on_from_a_checkpoint(alice: Person) -> None:
    job_id = alice.submit(language(resources={"nodes": 2}))
    done = alice.wait(job_id)
    assert (done["state"], done["progress"]["step"]) == ("completed", 40)
    (first,) = alice.attempts(job_id)
    assert len(first["nodes"]) == 2
    losses = alice.losses(job_id)
    assert sorted(losses) == list(range(1, 41))

    until(lambda: alice.job(job_id)["attempt"]["decided_at"], "Vigil to have read all that it left")
    answer = alice.client.post(f"/jobs/{job_id}/resume", json={"steps": 60})
    assert answer.status_code < 300, answer.text
    alice.wait(job_id, "pending", "running")
    done = alice.wait(job_id)
    assert (done["state"], done["progress"]["step"]) == ("completed", 60)
    assert sorted(alice.losses(job_id)) == list(range(1, 61))
    assert alice.losses(job_id)[40] == losses[40]


def test_a_run_is_its_owner_s_alone(portal: Portal, alice: Person) -> None:
    job_id = alice.submit(script(10))
    alice.wait(job_id)
    (run,) = (portal.runs / "vision").glob(f"{job_id}-*")
    token = run / "portal" / "token"
    assert (run / "job" / "attempt-1").stat().st_uid == portal.people.alice.uid
    for person, may in ((portal.people.alice, True), (portal.people.bob, False)):
        command = portal.people.as_user(person.name, "head", "-c", "1", str(token))
        assert (os.spawnvp(os.P_WAIT, command[0], command) == 0) is may
        command = portal.people.as_user(person.name, "ls", str(run / "job" / "checkpoints"))
        assert (os.spawnvp(os.P_WAIT, command[0], command) == 0) is may
    assert portal.key.read_bytes() not in b"".join(path.read_bytes() for path in _files(run))


def test_a_run_root_that_is_closed_to_somebody_is_named_and_not_tried_again(portal: Portal, alice: Person) -> None:
    portal.runs.chmod(0o2700)
    try:
        job_id = alice.submit(script(10))
        alice.wait(job_id)
        until(lambda: alice.job(job_id)["attempt"]["decided_at"], "the decision")
    finally:
        portal.runs.chmod(0o2710)
    (attempt,) = alice.attempts(job_id)
    assert attempt["cause"] == "permission"
    assert attempt["reason"].startswith(f"{ALICE} may not enter {portal.runs}: its mode is 2700")


def test_cancel_while_pending_and_while_running(portal: Portal, slurm: Cluster, alice: Person) -> None:
    waiting = alice.submit(script(10, begin="+2h"))
    alice.wait(waiting, "pending")
    until(lambda: alice.job(waiting)["attempt"]["scheduler_id"], "Slurm to have it")
    assert "BeginTime" in until(lambda: alice.job(waiting)["reason"], "the reason")
    alice.cancel(waiting)
    assert alice.wait(waiting)["state"] == "cancelled"

    running = alice.submit(script(100_000))
    alice.wait_for_step(running, 5)
    alice.cancel(running)
    done = alice.wait(running)
    assert (done["state"], done["attempt"]["cause"]) == ("cancelled", "cancelled")
    step = done["progress"]["step"]
    saved = until(lambda: alice.checkpoints(running), "its checkpoints")
    assert max(item["step"] for item in saved) == step, "it saved before it went"
    assert slurm.run("squeue", "--noheader", f"--user={ALICE}").strip() == ""


@pytest.fixture(scope="module")
def sysadmin(portal: Portal) -> Iterator[httpx.Client]:
    """A browser in which the first sysadmin is signed in; the link works once."""
    with httpx.Client(base_url=portal.url, follow_redirects=True, timeout=30, trust_env=False) as browser:
        portal.sign_in(browser)
        yield browser


def test_a_job_that_nothing_else_stops_is_killed(
    portal: Portal, slurm: Cluster, alice: Person, sysadmin: httpx.Client
) -> None:
    """Its ranks ignore SIGTERM and its launcher is stopped. All three ways end it, long before the grace would."""
    jobs = [_submit_deaf(alice) for _ in range(3)]
    processes = [process for job_id in jobs for process in _stopped_launcher(portal, alice, job_id)]
    for job_id in jobs:
        alice.cancel(job_id)
    cancelled_again, on_its_page, by_command = jobs
    _press_kill(sysadmin, on_its_page)
    assert "is killed" in portal.vigil("kill", str(by_command)).stdout
    cancel = f"/jobs/{cancelled_again}/cancel"  # within 10 s it counts as the same click
    until(lambda: alice.client.post(cancel).json()["attempt"]["kill_requested_at"], "the second cancel to kill")
    for job_id, who in ((on_its_page, PORTAL), (by_command, PORTAL), (cancelled_again, "alice")):
        attempt = alice.wait(job_id, timeout_s=30)["attempt"]
        assert (attempt["state"], attempt["reason"]) == ("cancelled", f"Killed by {who}.")
        requested, ended = (datetime.fromisoformat(attempt[name]) for name in ("cancel_asked_at", "ended_at"))
        assert (ended - requested).total_seconds() < STOP_SECONDS
        assert slurm.state(attempt["scheduler_id"]) == "CANCELLED"
    assert psutil.wait_procs(processes, timeout=10)[1] == []


def _submit_deaf(person: Person) -> int:
    spec = {**planted.Planted("deaf", "", "", ranks=1).spec(), "project": "vision"}
    response = person.client.post("/jobs", **planted.upload(spec))
    assert response.status_code == 201, response.text
    return int(response.json()["id"])


def _stopped_launcher(portal: Portal, person: Person, job_id: int) -> list[psutil.Process]:
    """Stop the launcher of a job once that has done ten steps; return it with its ranks."""
    (node,) = person.wait_for_step(job_id, 10)["attempt"]["nodes"]
    (run,) = (portal.runs / "vision").glob(f"{job_id}-*")
    (launcher,) = (child for child in launcher_parent(run, node).children() if is_launcher(child))
    launcher.suspend()
    return [launcher, *launcher.children(recursive=True)]


def _press_kill(browser: httpx.Client, job_id: int) -> None:
    page = browser.get(f"/jobs/{job_id}").text
    token = re.search(r'name="csrfmiddlewaretoken" value="([^"]+)"', page)
    assert token
    assert "Kill deaf now?" in page
    browser.post(f"/jobs/{job_id}/kill", data={"csrfmiddlewaretoken": token[1]}).raise_for_status()


def test_scancel_ends_it_for_good(slurm: Cluster, alice: Person) -> None:
    """A sysadmin cancels it without knowing whose job it is: it saves, and does not come back."""
    job_id = alice.submit(script(1_000_000))
    scheduler_id = alice.wait_for_step(job_id, 15)["attempt"]["scheduler_id"]
    slurm.run("scancel", scheduler_id)
    done = alice.wait(job_id)
    (attempt,) = alice.attempts(job_id)
    assert (done["state"], attempt["cause"]) == ("cancelled", "cancelled")
    until(lambda: alice.attempts(job_id)[0]["slurm_steps"], "the accounts to list it")
    assert alice.attempts(job_id)[0]["reason"] == "Cancelled by Slurm user root, outside Vigil."
    assert slurm.state(scheduler_id) == "CANCELLED"


def test_the_time_limit_warns_saves_and_goes_on(alice: Person) -> None:
    """Slurm checks limits twice a minute and may warn a minute early."""
    job_id = alice.submit(script(1_000_000, time_limit="00:02:00"))
    alice.wait_for_step(job_id, 5)
    until(lambda: len(alice.attempts(job_id)) == 2, "a second attempt", seconds=180)
    first, second = alice.attempts(job_id)
    assert first["cause"] == "stopped"
    assert second["scheduler_id"] == first["scheduler_id"], "Slurm requeued it"
    assert max(checkpoint["step"] for checkpoint in alice.checkpoints(job_id)) == first["step"], (
        "it saved before it went"
    )
    reached = alice.wait_for_step(job_id, first["step"] + 1, 120)["progress"]["step"]
    assert reached < first["step"] + 1_000, "it did not restart from the beginning"
    assert alice.attempts(job_id)[1]["resume_from"] is not None, "and shows from where"
    alice.cancel(job_id)
    alice.wait(job_id)


def test_preempted_it_goes_on_with_the_same_losses(slurm: Cluster, alice: Person) -> None:
    alone = alice.submit(language(steps=120))
    preempted = alice.submit(language(steps=120, resources={"exclusive": True}))
    (node,) = alice.wait_for_step(preempted, 15)["attempt"]["nodes"]
    wants_all = ("sbatch", "--partition=urgent", f"--nodelist={node}", "--exclusive", "--time=1", "--wrap=sleep 2")
    slurm.run(*wants_all, user=ALICE)
    until(lambda: len(alice.attempts(preempted)) == 2, "a second attempt")
    assert alice.attempts(preempted)[0]["state"] == "preempted"
    for job_id in (alone, preempted):
        assert alice.wait(job_id)["state"] == "completed"
    assert alice.losses(preempted) == alice.losses(alone)


def test_a_lost_node_is_left_and_its_ranks_commit_nothing_more(portal: Portal, slurm: Cluster, alice: Person) -> None:
    job_id = alice.submit(script(100_000, every=20, nodes=2))
    alice.wait_for_step(job_id, 25)
    (first,) = alice.attempts(job_id)
    lost = first["nodes"][0]
    with slurm.without(lost):  # its ranks live on: only the daemon is gone
        until(lambda: len(alice.attempts(job_id)) == 2, "a second attempt")
        assert alice.attempts(job_id)[0]["state"] == "node_fail"
        # Long enough for the remaining ranks to have saved again, if nothing stopped them.
        alice.wait_for_step(job_id, alice.attempts(job_id)[0]["step"] + 200, 120)
        second = alice.attempts(job_id)[1]
        assert lost not in second["nodes"]
    started = datetime.fromisoformat(second["started_at"]).timestamp()
    committed = list((portal.runs / "vision").glob(f"{job_id}-*/job/checkpoints/step-*/COMMITTED"))
    late = {json.loads(path.read_text())["generation"] for path in committed if path.stat().st_mtime > started + 5}
    assert len(late) == 1, "of the new launch alone"
    alice.cancel(job_id)
    alice.wait(job_id)


def test_an_elastic_job_goes_on_with_the_nodes_that_are_left(portal: Portal, slurm: Cluster, alice: Person) -> None:
    """First the leading launcher is lost, next to the batch script, then a whole node: still a single attempt.

    The launcher is started again, and taken in as soon as there is anything to start.
    """
    until(lambda: slurm.idle() >= 3, "nodes that have nothing to do")
    job_id = alice.submit(script(100_000, every=20, nodes="1:3", ranks_per_node=1))
    step = alice.wait_for_step(job_id, 25)["progress"]["step"]
    (attempt,) = alice.attempts(job_id)
    leading, other, last = attempt["nodes"]
    (run,) = (portal.runs / "vision").glob(f"{job_id}-*")
    (launcher,) = (child for child in launcher_parent(run, leading).children() if is_launcher(child))
    launcher.kill()
    step = alice.wait_for_step(job_id, step + 40)["progress"]["step"]
    members = run / "job" / "attempt-1" / "members"
    until(lambda: any(item["pid"] != launcher.pid for item in _contents(members, "node-0.*", beat=3)), "it to stand by")
    with slurm.without(last):
        launcher_parent(run, last).kill()
        until(
            lambda: "DOWN" in slurm.run("sinfo", "--noheader", f"--nodes={last}", "--format=%T").upper(),
            "its loss",
        )
        alice.wait_for_step(job_id, step + 40)
        assert slurm.state(attempt["scheduler_id"]) == "RUNNING"
    alice.cancel(job_id)
    done = alice.wait(job_id)
    assert (done["state"], done["attempt"]["number"]) == ("cancelled", 1)
    assert max(checkpoint["step"] for checkpoint in alice.checkpoints(job_id)) == done["progress"]["step"]
    newest = max(_contents(members, "incarnation-*", members=[]), key=lambda turn: int(turn["number"]))
    assert {member["name"] for member in newest["members"]} == {leading, other}, alice.logs_of(job_id)


def test_a_federation_that_loses_a_node_comes_to_the_same_model(portal: Portal, slurm: Cluster, alice: Person) -> None:
    """Four ranks on two nodes, of which one is lost midway: each loss equals that of two undisturbed ranks."""
    until(lambda: slurm.idle() >= 3, "nodes that have nothing to do")
    options = {"rounds": 200, "clients": 40, "epochs": 4, "checkpoint_every": 20}
    alone = alice.submit(federated(**options))
    lossy = alice.submit(federated(**options, resources={"nodes": "1:2"}))
    alice.wait_for_step(lossy, 25)
    (attempt,) = alice.attempts(lossy)
    assert len(attempt["nodes"]) == 2
    (run,) = (portal.runs / "vision").glob(f"{lossy}-*")
    lost = attempt["nodes"][1]
    with slurm.without(lost):
        launcher_parent(run, lost).kill()
        assert alice.wait(lossy, timeout_s=300)["state"] == "completed"
    assert alice.wait(alone, timeout_s=300)["state"] == "completed"
    assert alice.losses(lossy) == alice.losses(alone)
    assert len(alice.losses(alone)) == 200
    rows = [alice.client.get(f"/jobs/{job}/rounds", params={"limit": 200}).json()["items"] for job in (alone, lossy)]
    assert [[row["trained"] for row in of] for of in rows] == [[40] * 200] * 2


def test_without_its_batch_script_an_elastic_job_ends_all_the_same(
    portal: Portal, slurm: Cluster, alice: Person
) -> None:
    """Its node is lost, and srun with it. Slurm lets the others run, up to the time limit."""
    until(lambda: slurm.idle() >= 3, "nodes that have nothing to do")
    job_id = alice.submit(script(400, every=50, nodes="1:3", ranks_per_node=1))
    alice.wait_for_step(job_id, 25)
    (attempt,) = alice.attempts(job_id)
    with slurm.without(attempt["nodes"][0]):
        (run,) = (portal.runs / "vision").glob(f"{job_id}-*")
        there = processes_on_node(run, attempt["nodes"][0])
        assert len([item for item in there if item.name().startswith("slurmstepd")]) >= 2, (
            "of the batch script and of srun's step"
        )
        # Children first: those whose parent dies while they are stopped are sent HUP and CONT, and srun would end all.
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for process in reversed(there):
                with suppress(psutil.NoSuchProcess):  # ranks die with their launcher
                    process.send_signal(number)
        done = alice.wait(job_id, timeout_s=240)
        assert (done["state"], done["progress"]["step"], done["attempt"]["number"]) == ("completed", 400, 1)
        until(lambda: slurm.state(attempt["scheduler_id"]) == "CANCELLED", "its nodes to be given back")


def _contents(folder: Path, names: str, **least: Any) -> list[dict[str, Any]]:
    """Return the contents of the launchers' files that have these keys, with at least these values."""
    found = []
    for path in folder.glob(names):
        with suppress(FileNotFoundError):  # of a lost launcher
            found.append(json.loads(path.read_text()))
    return [item for item in found if all(name in item and item[name] >= value for name, value in least.items())]


@pytest.mark.parametrize("daemon", ["slurmrestd", "slurmdbd", "slurmctld"])
def test_a_daemon_that_is_away_ends_nothing(slurm: Cluster, alice: Person, daemon: str) -> None:
    job_id = alice.submit(script(100_000))
    alice.wait_for_step(job_id, 5)
    with slurm.without(daemon):
        step = alice.job(job_id)["progress"]["step"]
        alice.wait_for_step(job_id, step + 200)
    alice.wait_for_step(job_id, alice.job(job_id)["progress"]["step"] + 50)
    alice.cancel(job_id)
    done = alice.wait(job_id)
    assert (done["state"], done["attempt"]["number"]) == ("cancelled", 1)


def test_over_the_limit_it_names_which(slurm: Cluster, alice: Person) -> None:
    beyond = {"spec": language(resources={"qos": "small", "gpus_per_node": 4, "ranks_per_node": 1})}
    until(lambda: "QOS small" in alice.client.post("/jobs/check", json=beyond).text, "its limits to be known")
    held_job = slurm.run("sbatch", "--parsable", "-q", "small", "--gres=gpu:2", "--wrap=sleep 300", user=ALICE).strip()
    # Slurm itself refuses "H100" here, where its nodes have "h100".
    options = {"qos": "small", "gpus_per_node": 2, "gpu_type": "H100", "ranks_per_node": 1}
    job_id = alice.submit(language(resources=options))
    reason = until(lambda: "QOS" in alice.job(job_id)["reason"] and alice.job(job_id)["reason"], "Slurm's reason")
    assert "QOSMaxGRESPerUser" in reason or "QOSMaxGRESPerJob" in reason
    why = until(lambda: alice.client.get(f"/jobs/{job_id}/why").json(), "why")
    assert "small" in json.dumps(why)
    assert "2" in json.dumps(why)
    alice.cancel(job_id)
    alice.wait(job_id)
    slurm.run("scancel", held_job, user=ALICE)


def test_a_job_that_waits_for_a_license_names_it(slurm: Cluster, alice: Person) -> None:
    unknown = {"spec": language(resources={"licenses": "matlb"})}
    until(lambda: "Did you mean" in alice.client.post("/jobs/check", json=unknown).text, "its licenses to be known")
    first = alice.submit(script(100_000, licenses="matlab:2"))
    alice.wait(first, "running")
    second = alice.submit(script(5, licenses="matlab:1"))
    text = "matlab: 2 of 2 in use; this job requests 1."
    until(lambda: alice.client.get(f"/jobs/{second}/why").json()["text"] == text, "the sentence")
    until(lambda: alice.job(second)["reason"].startswith("Licenses"), "Slurm's reason")
    alice.cancel(first)
    assert alice.wait(second)["state"] == "completed"


def test_the_portal_away_for_a_job_s_whole_life(portal: Portal, alice: Person) -> None:
    job_id = alice.submit(script(60, begin="+5s"))
    until(lambda: alice.job(job_id)["attempt"]["scheduler_id"], "Slurm to have it")
    portal.stop()
    (run,) = (portal.runs / "vision").glob(f"{job_id}-*")
    until(lambda: (run / "job" / "attempt-1" / "result.json").exists(), "the run's end")
    portal.start()
    done = alice.wait(job_id)
    assert (done["state"], done["attempt"]["number"]) == ("completed", 1)
    until(lambda: alice.job(job_id)["progress"]["step"] == 60, "its spools to be read")
    assert sorted(alice.losses(job_id)) == list(range(1, 61))


def test_two_followers_do_nothing_twice(portal: Portal, slurm: Cluster, alice: Person) -> None:
    command = portal.command("-m", "console.worker", "follow")
    with subprocess.Popen(command, cwd=REPOSITORY, env=portal.environment, stderr=subprocess.DEVNULL) as second:
        try:
            before = len(slurm.run("sacct", "-nX", "--allusers", "--format=jobid").split())
            jobs = [alice.submit(script(5)) for _ in range(5)]
            for job_id in jobs:
                assert alice.wait(job_id)["attempt"]["number"] == 1
            after = len(slurm.run("sacct", "-nX", "--allusers", "--format=jobid").split())
            assert after - before == len(jobs)
        finally:
            second.terminate()


def _files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file() and not path.is_symlink()]
