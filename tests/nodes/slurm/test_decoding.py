"""Test decoding recorded answers of real Slurms: every version gives the same, except for what it does not report."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from nodes.schedulers.cluster import LicenseInfo, QueuedJobInfo
from nodes.schedulers.slurm import shapes, states
from nodes.schedulers.slurm.accounting import PastJobs
from nodes.schedulers.slurm.http import decoded
from nodes.schedulers.slurm.listed import FIELDS_READ, decode_job_list
from nodes.schedulers.slurm.rest import JobList
from nodes.schedulers.slurm.shapes import CANCELLED, JobRecord
from nodes.scheduling import gpu_types, node_states
from tests.nodes.slurm.simulated_rest import VERSIONS, SimulatedRest, body, load
from tests.slurm.people import ALICE, BOB, PORTAL

KEY = "00c0ffee00c0ffee"
# state, reason, exit code, signal, nodes, restart count
BUSY = {
    "gpus": ("running", "", None, None, ("dgx01", "dgx03"), 0),
    "completed": ("completed", "", 0, None, ("dgx01",), 0),
    "failed": ("failed", "", 3, None, ("dgx01",), 0),
    "signalled": ("failed", "", None, 9, ("dgx01",), 0),
    "steps": ("failed", "", 5, None, ("dgx01", "dgx02"), 0),
    "timeout": ("running", "", None, None, ("dgx01",), 0),
    "cancelled": ("cancelled", "", None, 15, ("dgx01",), 0),
    "cancelled-pending": ("cancelled", "", None, None, (), 0),
    "requeued": ("running", "", None, None, ("dgx02",), 1),
    "preempted": ("pending", "Resources", None, None, (), 1),
    "urgent": ("running", "", None, None, ("dgx04",), 0),
    "held": ("pending", "JobHeldUser", None, None, (), 0),
    "prolog-failed": ("pending", "launch_failed_requeued_held", None, None, (), 1),
    "dependency": ("pending", "Dependency", None, None, (), 0),
    "begin": ("pending", "BeginTime", None, None, (), 0),
    "too-long": ("pending", "PartitionTimeLimit", None, None, (), 0),
    "small": ("running", "", None, None, ("dgx02",), 0),
    "qos-limit": ("pending", "QOSMaxGRESPerUser", None, None, (), 0),
    "completing": ("completing", CANCELLED, None, None, ("dgx03",), 0),
    f"gpus.{KEY}": ("failed", "BadConstraints", None, None, (), 0),
}
some_versions = pytest.mark.parametrize("version", [VERSIONS[0], VERSIONS[-1]])
every_version = pytest.mark.parametrize("version", VERSIONS)


def records(version: str, moment: str) -> dict[str, list[JobRecord]]:
    listed = SimulatedRest(version, moment).rest.jobs()
    assert listed is not None
    raws = body(version, f"{moment}/slurm-jobs")["jobs"]
    found: dict[str, list[JobRecord]] = {}
    for raw, record in zip(raws, listed.records(), strict=True):
        found.setdefault(raw["name"], []).append(record)
    return found


def queue(version: str) -> dict[str, QueuedJobInfo]:
    return {job.name: job for job in SimulatedRest(version).slurm.queue()}


@every_version
def test_jobs_in_every_state(version: str) -> None:
    found = records(version, "busy")
    for name, expected in BUSY.items():
        status = found[name][0].status
        reports = (status.state, status.reason, status.exit_code, status.signal, status.nodes, status.restart_count)
        if name == "cancelled":  # the shell may have died of the signal, have ended by itself with 143, or been killed
            assert {reports[2], reports[3]} & {143, 15, 9}
            reports = (*reports[:2], *expected[2:4], *reports[4:])
        if name == "completing" and version == VERSIONS[0]:  # it has room for one word, and says COMPLETING
            expected = ("completing", "", *expected[2:])
        assert reports == expected, name
        assert status.key == KEY
        assert found[name][0].user == (PORTAL if KEY in name else ALICE)
        assert status.submitted_at is not None
        assert (status.started_at is None) == (status.state == "pending"), name
        assert (status.ended_at is None) == (status.state not in {"completed", "failed", "cancelled"}), name


@every_version
def test_a_requeued_job_on_hold_has_the_reason(version: str) -> None:
    status = records(version, "busy")["requeued-held"][0].status
    assert (status.state, status.restart_count) == ("pending", 1)
    assert status.reason.startswith("JobHeldUser")


@every_version
def test_components_of_a_heterogeneous_job(version: str) -> None:
    components = [job.component for job in SimulatedRest(version).slurm.queue() if job.name == "two-kinds"]
    (leader,) = {component.partition("+")[0] for component in components}
    assert sorted(components) == [f"{leader}+0", f"{leader}+1"]
    played = SimulatedRest(version)
    if played.rest.has_state_list:
        listed = played.rest.states()
        assert {f"{leader}+0", f"{int(leader) + 1}+1"} <= set(listed.words)
        assert {leader, str(int(leader) + 1)} <= set(listed.by_job_id())


@some_versions
def test_ends(version: str) -> None:
    found = records(version, "ended")
    assert {name: jobs[0].status.state for name, jobs in found.items() if name in ("timeout", "gpus", "held")} == {
        "timeout": "timeout",
        "gpus": "cancelled",
        "held": "cancelled",
    }
    status = found["timeout"][0].status
    assert status.started_at
    assert status.ended_at
    assert 60 <= status.ended_at - status.started_at <= 100


@every_version
def test_tasks_of_an_array_by_either_id(version: str) -> None:
    found = records(version, "busy")
    array, *_ = [item.job_id for item in found["array"] if item.tasks]
    waiting = {item.job_id: item.tasks for item in found["array"] if item.tasks}
    assert waiting == {array: (2, 3, 4, 5, 6, 7, 8, 9)}
    assert {item.status.scheduler_id for item in found["array"]} == {array, f"{array}_0", f"{array}_1"}
    assert [item.tasks for item in found["held-array"]] == [(1, 4, 7)]
    assert {item.status.exit_code for item in found["finished-array"]} == {0, 1, 2}
    slurm = SimulatedRest(version).slurm
    requests = [f"{array}_{task}" for task in range(10)]
    statuses = slurm.status(requests)
    assert [statuses[item].state for item in requests] == ["running"] * 2 + ["pending"] * 8
    assert [statuses[item].scheduler_id for item in requests] == requests


@every_version
def test_the_queue(version: str) -> None:
    found = queue(version)
    assert not {"completed", "failed", "cancelled"} & set(found)
    gpus = found["gpus"]
    assert (gpus.gpus, gpus.gpu_type, gpus.cpus, gpus.memory_mib, gpus.node_count) == (6, "h100", 2, 2000, 2)
    assert gpus.gpu_indices == {"dgx01": (0, 1, 2), "dgx03": (0, 1, 2)}
    assert (gpus.account, gpus.partition, gpus.qos, gpus.time_limit_s) == ("vision", "batch", "normal", 5400)
    assert gpus.started_at
    assert gpus.ends_at == gpus.started_at + 5400
    features = found["features"]
    assert (features.features, features.cpus, features.memory_mib, features.time_limit_s) == ("h100", 16, 4096, 86_400)
    assert found["begin"].starts_at is not None
    assert found["begin"].started_at is None
    assert found["dependency"].dependency.startswith("afterok:")
    assert found["held"].priority == 0
    assert found["held-array"].tasks == 3
    assert {"pending", "running", "completing"} == {job.state for job in found.values()}


@every_version
def test_nodes(version: str) -> None:
    nodes = {node.name: node for node in SimulatedRest(version).slurm.nodes()}
    assert {name: node.state for name, node in nodes.items() if name not in ("dgx01", "dgx03")} == {
        "dgx02": "draining", "dgx04": "allocated", "dgx05": "drained", "dgx06": "down", "dgx07": "maintenance",
        "dgx08": "mixed",
    }  # fmt: skip
    assert {nodes["dgx01"].state, nodes["dgx03"].state} <= {"mixed", "completing"}
    fan = nodes["dgx05"]
    assert (fan.reason, fan.reason_by) == ("fan 3 is loud", PORTAL)
    assert fan.reason_at is not None
    assert (nodes["dgx06"].reason, nodes["dgx01"].reason) == ("Not responding", "")
    request = shapes.node({"name": "a", "reason": "fan (3) (vigil: sam)", "reason_set_by_user": PORTAL})
    assert (request.reason, request.reason_by) == ("fan (3)", "sam")
    dgx01 = nodes["dgx01"]
    assert (dgx01.gpus, dgx01.gpus_used, dgx01.gpu_type, dgx01.gpus_allocated) == (8, 3, "h100", (0, 1, 2))
    assert (dgx01.cpus, dgx01.memory_mib) == (128, 2_000_000)
    assert dgx01.cpus_used >= 1
    assert dgx01.memory_used_mib >= 1000
    assert set(dgx01.partitions) == {"batch", "urgent", "short"}
    assert dgx01.features == ("h100", "dgx01")
    assert dgx01.booted_at is not None
    assert nodes["dgx05"].gpus_allocated == ()


@every_version
def test_partitions(version: str) -> None:
    slurm = SimulatedRest(version).slurm
    slurm.queue()
    found = {partition.name: partition for partition in slurm.partitions()}
    batch, urgent, short, debug = (found[name] for name in ("batch", "urgent", "short", "debug"))
    assert (batch.state, batch.is_default, len(batch.nodes)) == ("up", True, 8)
    assert (batch.max_time_s, batch.default_time_s, batch.priority_tier) == (7 * 86_400, 3600, 1)
    assert (urgent.is_default, urgent.priority_tier, urgent.max_time_s) == (False, 10, 86_400)
    assert (short.max_time_s, short.default_time_s, debug.nodes) == (600, 300, ("dgx08",))
    assert (batch.max_nodes, batch.allowed_accounts, batch.qos) == (None, (), "")


@some_versions
def test_reservations(version: str) -> None:
    found = {reservation.name: reservation for reservation in SimulatedRest(version).slurm.reservations()}
    assert found["course"].nodes == ("dgx01", "dgx03")
    assert found["course"].users == (ALICE,)
    assert found["course"].starts_at
    assert found["course"].ends_at == found["course"].starts_at + 2 * 3600
    assert found["kept"].accounts == ("speech",)
    assert "MAINT" in found["upkeep"].flags


@every_version
def test_licenses(version: str) -> None:
    played = SimulatedRest(version)
    assert played.slurm.licenses() == [LicenseInfo(name="matlab", total=2, used=1)]
    rows = [{"LicenseName": "flex", "Total": 3, "Used": 1, "Free": 0}, {"LicenseName": "flex", "Total": 2, "Used": 0}]
    played.answers["/licenses"] = httpx.Response(200, json={"licenses": [*rows, {"Total": 1}]})
    found = played.slurm.licenses()
    assert found == [LicenseInfo(name="flex", total=5, used=3)], (
        "taken outside of Slurm, and counted for groups of nodes"
    )
    assert found.unreadable == 1


@some_versions
def test_limits_and_shares(version: str) -> None:
    accounts = SimulatedRest(version).slurm.accounts()
    small = next(qos for qos in accounts.qos if qos.name == "small")
    assert (small.priority, small.preempts) == (50, ("normal",))
    limits = small.limits
    assert limits.max_time_s == 7200
    assert (limits.user_jobs, limits.user_submitted) == (3, 9)
    assert dict(limits.group) == {"gres/gpu": 16, "cpu": 512}
    assert dict(limits.job) == {"gres/gpu": 8}
    assert dict(limits.node) == {"gres/gpu": 4}
    assert dict(limits.user) == {"gres/gpu": 2}
    assert dict(limits.account) == {"gres/gpu": 12}
    bob = next(
        association
        for association in accounts.associations
        if (association.user, association.account) == (BOB, "speech")
    )
    assert (bob.shares, bob.limits.max_time_s, bob.limits.user_jobs, bob.limits.user_submitted) == (4, 86_400, 5, 20)
    assert dict(bob.limits.group) == {"gres/gpu": 10}
    assert dict(bob.limits.job) == {"gres/gpu": 4, "node": 2}
    assert bob.is_default
    speech = next(
        association
        for association in accounts.associations
        if (association.user, association.account) == ("", "speech")
    )
    assert speech.parent == "root"
    shown = bob.fair_share is not None
    assert shown == (version != "v0.0.38")


@every_version
def test_an_empty_cluster(version: str) -> None:
    played = SimulatedRest(version, "nothing")
    assert played.slurm.queue() == []
    assert len(played.slurm.nodes()) == 8
    if version in (VERSIONS[0], VERSIONS[-1]):
        assert played.slurm.reservations() == []


@some_versions
def test_runs_of_a_requeued_job(version: str) -> None:
    played = SimulatedRest(version, "ended")
    listed = body(version, "ended/slurmdb-job-requeued")["jobs"]
    job_id = str(listed[0]["job_id"])
    played.answers[f"slurmdb/{version}/job/{job_id}"] = lambda _: load(version, "ended/slurmdb-job-requeued")
    first, second = played.rest.runs(job_id)
    assert (first.record.status.restart_count, second.record.status.restart_count) == (0, 1)
    assert first.record.status.ended_at is not None
    assert (first.record.status.previous_end, second.record.status.state) == ("", "cancelled")


@some_versions
def test_what_slurmctld_lost_was_not_cancelled(version: str) -> None:
    """A cancelled job's state names the user who cancelled it."""
    report = body(version, "ended/slurmdb-jobs")
    job_id = next(str(raw["job_id"]) for raw in report["jobs"] if raw["name"] == "cancelled")
    (raw,) = (raw for raw in report["jobs"] if str(raw["job_id"]) == job_id)
    for by, is_found in ((raw["kill_request_user"], True), ("", False)):
        played = SimulatedRest(version, "nothing")
        answer = {**report, "jobs": [{**raw, "kill_request_user": by}]}
        played.answers[f"slurmdb/{version}/job/{job_id}"] = httpx.Response(200, json=answer)
        assert (job_id in PastJobs(played.rest).statuses([job_id])) == is_found


@some_versions
def test_steps(version: str) -> None:
    played = SimulatedRest(version, "ended")
    job_id = str(body(version, "ended/slurmdb-job-steps")["jobs"][0]["job_id"])
    played.answers[f"slurmdb/{version}/job/{job_id}"] = lambda _: load(version, "ended/slurmdb-job-steps")
    steps = played.slurm.steps(job_id)
    assert [(step.number, step.name) for step in steps] == [("batch", "batch"), ("0", "true"), ("1", "two")]
    assert [step.state for step in steps] == ["failed", "completed", "failed"]
    assert steps[1].nodes == ("dgx01", "dgx02")
    assert (steps[1].exit_code, steps[2].exit_code) == (0, None if version == "v0.0.38" else 5)


@some_versions
def test_accounts_of_jobs_that_never_started(version: str) -> None:
    """Slurm writes their nodes as "None assigned"."""
    found = {item.job_id: item.status for item in SimulatedRest(version, "ended").rest.accounted(user=ALICE, since=0)}
    names = {str(raw["job_id"]): raw["name"] for raw in body(version, "ended/slurmdb-jobs")["jobs"]}
    report = {names[job_id]: status for job_id, status in found.items()}
    assert report["resources"].nodes == ()
    assert report["gpus"].nodes == ("dgx01", "dgx03")
    assert report["signalled"].signal == 9
    assert report["failed"].exit_code == (None if version == "v0.0.38" else 3)
    assert report["timeout"].state == "timeout"
    assert {item.key for item in report.values()} == {KEY}


class RecordingJob(dict[str, object]):
    """A job that records which fields are read."""

    names_read: set[str] = set()

    def get(self, name: str, default: object = None) -> object:
        self.names_read.add(name)
        return super().get(name, default)


@every_version
def test_the_list_leaves_out_only_what_nobody_reads(version: str) -> None:
    report = body(version, "busy/slurm-jobs")
    answers: list[Any] = [read(json.dumps(report).encode()) for read in (decoded, decode_job_list)]
    whole, brief = (answer["jobs"] for answer in answers)
    assert {*brief[0]} == {*FIELDS_READ}
    for raw, short in zip(map(RecordingJob, whole), brief, strict=True):
        record = shapes.record(raw)
        assert shapes.record(short) == record
        assert shapes.queued(short, record) == shapes.queued(raw, record)
    assert JobList(brief).default_partition() == JobList(list(map(RecordingJob, whole))).default_partition()
    assert RecordingJob.names_read == {*FIELDS_READ}


@pytest.mark.parametrize(
    "content",
    ['{"jobs": ["odd", {"job_id": 1}]}', '{"errors": [{"error_number": 7}]}', '{"jobs": [{"priority": NaN}]}'],
)
def test_an_odd_list_is_decoded_whole(content: str) -> None:
    found = decode_job_list(content.encode())
    assert repr(found) == repr(json.loads(content))


def test_types_of_gpus_keep_the_configured_case() -> None:
    """These are the answers of Slurm 24.11 and 26.05 for `Gres=gpu:H100:8,gpu:1g.10gb:7`: TRES are lower-case."""
    payload = {
        "name": "a",
        "gres": "gpu:H100:8,gpu:1g.10gb:7",
        "tres_used": "gres/gpu=3,gres/gpu:h100=1,gres/gpu:1g.10gb=2",
    }
    for more in ({}, {"gres_used": "gpu:H100:1(IDX:0),gpu:1g.10gb:2(IDX:0-1)"}):
        found = shapes.node({**payload, **more})
        assert dict(found.gpus_used_by_type) == {"H100": 1, "1g.10gb": 2}
        assert gpu_types.free(found) == {"H100": 7, "1g.10gb": 5}


@pytest.mark.parametrize(
    ("words", "state"),
    [
        (["IDLE", "DRAIN"], "drained"),
        (["IDLE", "DRAIN", "MAINTENANCE", "RESERVED"], "drained"),
        (["IDLE", "DRAIN", "NOT_RESPONDING"], "drained+not_responding"),
        (["IDLE", "DRAIN", "REBOOT_REQUESTED"], "drained+reboot_requested"),
        (["IDLE", "DRAIN", "POWERED_DOWN"], "drained+powered_down"),
        (["IDLE", "DRAIN", "INVALID_REG"], "drained+invalid_reg"),
        (["UNKNOWN", "DRAIN"], "drained+unknown"),
        (["MIXED", "DRAIN", "NOT_RESPONDING"], "draining+not_responding"),
    ],
)
def test_what_else_keeps_a_drained_node_out_of_service(words: list[str], state: str) -> None:
    assert states.node_state(words) == state
    assert node_states.is_drained(state)
    assert not node_states.is_in_service(state)
    assert node_states.is_drained_without_jobs(state) == (state == "drained")


def test_a_node_that_slurm_reboots_is_down_for_a_while() -> None:
    """24.11 lists the words together, 22.05 the flag apart; a reboot that takes too long is only down."""
    assert states.node_state(["DOWN", "REBOOT_ISSUED"]) == "down+reboot_issued"
    assert states.node_state(["down", "REBOOT_ISSUED"]) == "down+reboot_issued"
    assert states.node_state(["DOWN", "NOT_RESPONDING"]) == "down"
