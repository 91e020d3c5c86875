"""Test the Slurm client on a complete Slurm: changes by people and operators, and daemons that come and go."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from nodes.schedulers.base import ENDED, UNKNOWN, JobStatus, SchedulerError, Submission
from nodes.schedulers.slurm.http import SlurmHttp
from nodes.schedulers.slurm.rest import SlurmRest
from nodes.schedulers.slurm.scheduler import Slurm
from nodes.schedulers.slurm.tokens import KeyFileTokens
from tests.slurm.cluster import Cluster
from tests.slurm.config import failing_prolog
from tests.slurm.people import ALICE, BOB, PORTAL
from tests.waiting import until

KEYS = iter(range(1, 10_000))
PATIENCE_S = 180.0  # a node that has not reached slurmctld tries again only after a while


class Followed:
    """Slurm as the portal follows it, and alice's jobs in it."""

    def __init__(self, slurm: Cluster) -> None:
        self.cluster = slurm
        tokens = KeyFileTokens(slurm.layout.jwt_key)
        self.http = SlurmHttp(slurm.url, tokens=tokens, user=PORTAL)
        self.slurm = Slurm(
            SlurmRest(self.http), tokens=tokens, user=PORTAL, scontrol=str(slurm.layout.bin / "scontrol")
        )
        self.submitted: list[str] = []

    def submission(self, script: str = "sleep 300", **options: Any) -> Submission:
        number = next(KEYS)
        batch = self.cluster.layout.scratch / f"batch-{number}.sh"
        batch.write_text(f"#!/bin/bash\n{script}\n")
        values: dict[str, Any] = {
            "key": f"{time.time_ns():016x}"[-16:], "name": "client", "user": ALICE, "script": str(batch),
            "directory": "/tmp", "output": "/dev/null", "time_limit_s": 600, "grace_s": 30,
        }  # fmt: skip
        return Submission(**{**values, **options})

    def submit(self, script: str = "sleep 300", **options: Any) -> str:
        self.submitted.append(self.slurm.submit(self.submission(script, **options)))
        return self.submitted[-1]

    def default_partitions(self) -> list[str]:
        return [partition.name for partition in self.slurm.partitions() if partition.is_default]

    def status(self, job: str) -> JobStatus:
        return self.slurm.status([job])[job]

    def wait(self, job: str, *states: str) -> JobStatus:
        found: list[JobStatus] = []

        def poll() -> bool:
            found.append(self.status(job))
            return found[-1].state in states

        until(poll, seconds=PATIENCE_S)
        return found[-1]

    def reason(self, job: str) -> str:
        """Return a job's reason from a new listing of the queue, which is otherwise cached for 15 seconds."""
        self.slurm._cache.listed_at = float("-inf")
        return next((row.reason for row in self.slurm.queue() if row.scheduler_id == job), "")

    def control(self, *words: str) -> None:
        self.cluster.run("scontrol", *words)


@pytest.fixture
def followed(slurm: Cluster) -> Iterator[Followed]:
    created = Followed(slurm)
    yield created
    for job in created.submitted:
        created.slurm.cancel(job, user=ALICE)
    created.http.close()


def count_nodes(slurm: Cluster, key: Path, *, life_s: int = 900) -> int:
    """Return how many nodes slurmrestd lists for a token that this key signs."""
    http = SlurmHttp(slurm.url, tokens=KeyFileTokens(key, life_s=life_s), user=PORTAL)
    try:
        return len(SlurmRest(http).nodes())
    finally:
        http.close()


def test_wrong_keys_and_late_tokens(slurm: Cluster, tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_bytes(slurm.layout.jwt_key.read_bytes())
    key.chmod(0o600)
    assert count_nodes(slurm, key)
    with pytest.raises(SchedulerError, match=f"token of {PORTAL}") as refused:
        count_nodes(slurm, key, life_s=-60)
    assert not refused.value.permanent
    key.chmod(0o644)
    with pytest.raises(SchedulerError, match="chmod 0600"):
        count_nodes(slurm, key)
    key.write_bytes(b"x" * 32)
    key.chmod(0o600)
    with pytest.raises(SchedulerError, match=f"token of {PORTAL}"):
        count_nodes(slurm, key)


@pytest.mark.parametrize("minutes", [-14, -10, 10, 60])
def test_clocks_apart(slurm: Cluster, minutes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The portal's clock may be 15 minutes behind Slurm's, and any time ahead."""
    now = time.time
    monkeypatch.setattr(time, "time", lambda: now() + minutes * 60)
    assert count_nodes(slurm, slurm.layout.jwt_key) == 4


def test_behind_our_back(followed: Followed) -> None:
    first, second = followed.submit(), followed.submit()
    followed.wait(first, "running")
    followed.cluster.run("scancel", first, user=ALICE)
    assert followed.wait(first, *ENDED).state == "cancelled"
    until(lambda: followed.slurm.cancelled_by(first) == ALICE, seconds=PATIENCE_S)
    followed.wait(second, "running")
    followed.control("update", f"jobid={second}", "timelimit=20")
    followed.reason(second)
    assert next(job for job in followed.slurm.queue() if job.scheduler_id == second).time_limit_s == 1200
    followed.control("requeue", second)
    until(lambda: followed.status(second).restart_count == 1, seconds=PATIENCE_S)
    assert followed.wait(second, "pending").previous_end == ""
    followed.control("hold", second)
    until(lambda: "JobHeld" in followed.reason(second))
    assert followed.status(second).state == "pending"
    followed.slurm.release(second)
    status = followed.wait(second, "running")
    assert (status.restart_count, status.previous_end) == (1, "")


def test_a_hold_and_its_release_are_noticed_at_the_next_poll(followed: Followed) -> None:
    """Slurm's short list calls it pending all the while."""
    job = followed.submit(begin_at=time.time() + 3600)
    until(lambda: followed.status(job).reason == "BeginTime", seconds=PATIENCE_S)
    for command, text in (("hold", "JobHeldAdmin"), ("release", "BeginTime"), ("uhold", "JobHeldUser")):
        followed.control(command, job)
        until(
            lambda text=text: followed.status(job).reason == text, seconds=10
        )  # the whole queue is read again after 15 s


def test_a_failed_prolog_is_no_persons_hold(followed: Followed) -> None:
    """Slurm's reason is JobHeldUser; its description and the accounts record what happened, and where."""
    failing = failing_prolog(followed.cluster.layout, "dgx03")
    failing.touch()
    try:
        job = followed.submit(required_nodes=("dgx03",))
        until(lambda: followed.status(job).reason.startswith("launch_failed"), seconds=PATIENCE_S)
        status = followed.status(job)
        assert (status.state, status.reason) == ("pending", "launch_failed_requeued_held, dgx03")
        assert (status.restart_count, status.previous_nodes) == (1, ("dgx03",))
        node = next(node for node in followed.slurm.nodes() if node.name == "dgx03")
        assert (node.state, node.reason) == ("drained", "Prolog error")
    finally:
        failing.unlink()
        followed.control("update", "nodename=dgx03", "state=resume")
    followed.control("release", job)
    assert followed.wait(job, "running").nodes == ("dgx03",)


def test_somebody_else_s_job(followed: Followed) -> None:
    job = followed.submit()
    followed.wait(job, "running")
    with pytest.raises(SchedulerError, match=r"denied|not permitted") as refused:
        followed.slurm.cancel(job, user=BOB)
    assert refused.value.number in {2002, 2010}
    assert followed.status(job).state == "running"


def test_nodes_that_are_wanted_and_not(followed: Followed) -> None:
    wanted = followed.submit(required_nodes=("dgx03",))
    unwanted = followed.submit(excluded_nodes=("dgx01", "dgx02", "dgx03"), min_nodes=1, max_nodes=1)
    both = followed.submit(min_nodes=2, max_nodes=2, required_nodes=("dgx04",), excluded_nodes=("dgx01", "dgx02"))
    assert followed.wait(wanted, "running").nodes == ("dgx03",)
    assert followed.wait(unwanted, "running").nodes == ("dgx04",)
    assert followed.wait(both, "running").nodes == ("dgx03", "dgx04")


def test_what_can_be_requested(followed: Followed) -> None:
    typed = followed.submit(
        gpus_per_node=3, gpu_type="h100", constraint="h100", memory_mib_per_node=5000, cpus_per_node=7
    )
    whole = followed.submit(exclusive=True)
    later = followed.submit(begin_at=time.time() + 3600)
    for job in (typed, whole):
        followed.wait(job, "running")
    assert followed.wait(later, "pending").started_at is None
    followed.reason(typed)
    queue = {job.scheduler_id: job for job in followed.slurm.queue()}
    item = queue[typed]
    assert (item.gpus, item.gpu_type, item.features, item.memory_mib, item.cpus) == (3, "h100", "h100", 5000, 7)
    assert [len(indices) for indices in item.gpu_indices.values()] == [3]
    assert queue[whole].cpus == 128
    assert "BeginTime" in followed.reason(later)
    starts = queue[later].starts_at
    assert starts is not None
    assert 3500 < starts - time.time() < 3700


def test_a_reservation(followed: Followed) -> None:
    followed.control("create", "reservation", "reservationname=lesson", "starttime=now", "duration=30", "nodes=dgx02",
                     f"users={ALICE}", "flags=ignore_jobs")  # fmt: skip
    try:
        job = followed.submit(reservation="lesson")
        assert followed.wait(job, "running").nodes == ("dgx02",)
        (found,) = followed.slurm.reservations()
        assert (found.name, found.nodes, found.users) == ("lesson", ("dgx02",), (ALICE,))
        followed.slurm.cancel(job, user=ALICE)
        followed.wait(job, "cancelled")
    finally:
        until(lambda: not followed.cluster.run("squeue", "-h", "--reservation=lesson").strip())
        followed.control("delete", "reservationname=lesson")


def test_a_single_task_of_an_array(followed: Followed) -> None:
    array = followed.slurm.rest.submit(followed.submission(), "#!/bin/sh\nsleep 300\n", array="0-3%2")
    followed.submitted.append(array)
    tasks = [f"{array}_{task}" for task in range(4)]
    followed.wait(tasks[1], "running")
    followed.slurm.cancel(tasks[1], user=ALICE)
    followed.slurm.cancel(tasks[3], user=ALICE)
    assert followed.wait(tasks[1], *ENDED).state == "cancelled"
    assert {followed.wait(task, "running").state for task in (tasks[0], tasks[2])} == {"running"}


def test_a_heterogeneous_job_of_somebody_else(followed: Followed) -> None:
    """Slurm's short list writes its components as "85+0" and "86+1", which is no id that it answers to."""
    job = followed.submit()
    others = ("sbatch", "--parsable", "--output=/dev/null", "-N1", ":", "-N1", "--wrap", "sleep 300")
    leader = followed.cluster.run(*others, user=BOB).strip()
    try:
        followed.wait(job, "running")
        followed.wait(leader, "running")
        followed.reason(job)
        queue = followed.slurm.queue()
        assert queue.unreadable == 0
        components = {item.scheduler_id: item.component for item in queue if item.component}
        assert components == {leader: f"{leader}+0", str(int(leader) + 1): f"{leader}+1"}
    finally:
        followed.cluster.run("scancel", leader, user=BOB)
    followed.wait(leader, "cancelled")


def test_a_limit_of_a_qos(followed: Followed) -> None:
    first = followed.submit(qos="small", gpus_per_node=2)
    followed.wait(first, "running")
    second = followed.submit(qos="small", gpus_per_node=1)
    until(lambda: followed.reason(second) == "QOSMaxGRESPerUser", seconds=PATIENCE_S)
    assert followed.status(second).state == "pending"


def test_what_is_wrong_is_refused_at_once(followed: Followed) -> None:
    wrong: list[dict[str, Any]] = [
        {"account": "speech"},
        {"partition": "moon"},
        {"qos": "gold"},
        {"reservation": "none"},
    ]
    for options in wrong:
        with pytest.raises(SchedulerError, match=r"Slurm error 2\d\d\d: .*nvalid") as refused:
            followed.submit(**options)
        assert refused.value.permanent


def test_a_job_with_a_name_in_latin_1(followed: Followed) -> None:
    script = followed.cluster.layout.scratch / "latin.sh"
    script.write_bytes(b"#!/bin/sh\n#SBATCH --job-name=caf\xe9\n#SBATCH --output=/dev/null\nsleep 300\n")
    followed.submitted.append(followed.cluster.run("sbatch", "--parsable", script, user=ALICE).strip())
    other = followed.submit()
    assert followed.wait(other, "running")
    followed.reason(other)
    assert {job.scheduler_id for job in followed.slurm.queue()} >= {other, followed.submitted[0]}


def test_slurmrestd_comes_and_goes(followed: Followed) -> None:
    job = followed.submit()
    followed.wait(job, "running")
    with followed.cluster.without("slurmrestd"), pytest.raises(SchedulerError, match="cannot be reached"):
        followed.slurm.nodes()
    assert followed.status(job).state == "running"


@pytest.mark.parametrize("daemon", ["slurmctld", "slurmdbd"])
def test_nothing_wrong_is_reported_while_daemons_are_away(followed: Followed, daemon: str) -> None:
    running, short = followed.submit(), followed.submit("sleep 4; exit 3")
    followed.wait(running, "running")
    followed.wait(short, "running")
    with followed.cluster.without(daemon):
        deadline = time.monotonic() + 6
        answers = []
        while time.monotonic() < deadline:
            with suppress(SchedulerError):
                answers.append(followed.slurm.status([running, short]))
            time.sleep(0.3)
    assert answers or daemon == "slurmctld", "no answer, though slurmctld needs no accounts to describe jobs"
    for statuses in answers:
        assert set(statuses) == {running, short}
        assert statuses[running].state in {"running", UNKNOWN}
        assert statuses[short].state in {"running", "completing", "failed", UNKNOWN}
    assert followed.wait(short, *ENDED).exit_code == 3
    assert followed.status(running).state == "running"


def test_drain_and_undrain(followed: Followed) -> None:
    def node() -> Any:
        return next(node for node in followed.slurm.nodes() if node.name == "dgx04")

    followed.slurm.drain("dgx04", "GPU 3: Xid 79, it's off the bus")
    try:
        until(lambda: node().state in {"drained", "draining"})
        drained = node()
        assert drained.reason == "GPU 3: Xid 79, it's off the bus"
        assert drained.reason_by == PORTAL
        assert time.time() - 30 < drained.reason_at < time.time() + 5
    finally:
        followed.slurm.undrain("dgx04")
    until(lambda: node().state in {"idle", "mixed"})
    with pytest.raises(SchedulerError):
        followed.slurm.drain("dgx99", "x")
    with pytest.raises(SchedulerError, match="not the name of a node"):
        followed.slurm.drain("dgx04;reboot", "x")


def test_the_default_partition_is_read(followed: Followed) -> None:
    """scontrol names it from the start; elsewhere the first job that named no partition shows it."""
    assert followed.default_partitions() == ["batch"]
    followed.slurm.commands.scontrol = "scontrol-that-nobody-installed"
    assert followed.default_partitions() in ([], ["batch"])  # the REST API of 22.05 reports it
    followed.wait(followed.submit(), "running")
    followed.reason("")
    assert followed.default_partitions() == ["batch"]
