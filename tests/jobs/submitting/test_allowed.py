"""Test that what Slurm would refuse (error 2050) or never start is reported by field before submission."""

from __future__ import annotations

import re
import time
from typing import Any

import pytest

from jobs.errors import SpecError
from jobs.models import Job, Sweep
from jobs.spec import SweepSpec
from jobs.submitting import sweeps
from jobs.submitting.admission import check
from jobs.submitting.dryrun import dry_run
from nodes.cluster import sync
from nodes.schedulers.base import NodeStatus, SchedulerError
from nodes.schedulers.cluster import (
    AccountsInfo,
    AssociationInfo,
    Limits,
    PartitionInfo,
    QosInfo,
    QueuedJobInfo,
    ReservationInfo,
)
from portal.models import Project, User
from tests.jobs.schedulers import DGX_01, ScriptedScheduler
from tests.jobs.submissions import spec_of, submit_spec

pytestmark = pytest.mark.django_db
NODES = [
    NodeStatus(name=f"dgx-0{i}", state="idle", partitions=("gpu", "short"), gpus=8, gpu_type="h100", cpus=128)
    for i in range(1, 5)
]
GPU = "gres/gpu"
SMALL = Limits(
    max_time_s=7200, job={GPU: 4, "node": 2}, node={"cpu": 16}, group={"mem": 65_536}, user={GPU: 8}, user_submitted=2
)


@pytest.fixture(autouse=True)
def _lab(oskar: User, project: Project) -> None:
    User.objects.filter(pk=oskar.pk).update(slurm_user="oskar")
    oskar.refresh_from_db()
    Project.objects.filter(pk=project.pk).update(slurm_account="vision")


def read(*queue: QueuedJobInfo, reserved: tuple[ReservationInfo, ...] = (), **facts: Any) -> None:
    partitions = [
        PartitionInfo(name="gpu", is_default=True, max_time_s=86_400),
        PartitionInfo(name="short", max_time_s=600, max_nodes=1, denied_accounts=("vision",), allowed_qos=("normal",)),
    ]
    association = AssociationInfo(
        account="vision", user="oskar", default_qos="normal", limits=Limits(user_submitted=3), **facts
    )
    accounts = AccountsInfo(
        qos=(QosInfo(name="normal"), QosInfo(name="small", limits=SMALL)),
        associations=(AssociationInfo(account="lab"), AssociationInfo(account="vision", parent="lab"), association),
    )
    scheduler = ScriptedScheduler(
        machines=NODES, divided=partitions, queued=list(queue), reserved=list(reserved), accounted=accounts
    )
    sync.read(scheduler)


def refusals(user: User, **resources: Any) -> dict[str, str]:
    spec = spec_of(resources=resources, run={"global_batch": 3360})
    try:
        check(user, spec, code=None)
    except SpecError as error:
        return {
            problem.field.removeprefix("resources."): problem.message.replace("\N{NO-BREAK SPACE}", " ")
            for problem in error.problems
        }
    return {}


def test_a_partition_s_limits(oskar: User) -> None:
    read()
    assert refusals(oskar) == {}
    assert refusals(oskar, time_limit="25:00:00") == {
        "time_limit": "Partition gpu limits jobs to 1 d; this job requests 1 d 1 h."
        " Request 1 d at most, or choose another partition."
    }
    found = refusals(oskar, partition="short", nodes=2, time_limit="01:00:00", qos="small")
    assert set(found) == {"time_limit", "nodes", "partition", "qos"}
    assert found["time_limit"].startswith("Partition short limits jobs to 10 min; this job requests 1 h.")
    assert found["nodes"] == "Partition short gives a job at most 1 node; this job requests 2."
    assert found["partition"] == "Partition short does not accept account vision. Choose another partition."
    assert "does not accept QOS small. It accepts normal." in found["qos"]


@pytest.mark.parametrize(
    ("resources", "field", "message"),
    [
        ({"time_limit": "03:00:00"}, "time_limit", "QOS small limits jobs to 2 h; this job requests 3 h. Request 2 h"),
        (
            {"gpus_per_node": 8},
            "gpus_per_node",
            "QOS small lets one job use 4 GPUs; this job requests 8. Request 4 GPUs",
        ),
        ({"gpus_per_node": 4, "nodes": 2}, "nodes", "QOS small lets one job use 4 GPUs; this job requests 8."),
        ({"nodes": 3}, "nodes", "QOS small lets one job use 2 nodes; this job requests 3. Request 2 nodes at most."),
        ({"ranks_per_node": 32}, "ranks_per_node", "use 16 CPUs on each node; this job requests 32."),
        ({"cpus_per_rank": 32}, "cpus_per_rank", "use 16 CPUs on each node; this job requests 32."),
        ({"memory_gib": 65}, "memory_gib", "lets everybody in it together use 64.0 GiB of memory at once"),
    ],
)
def test_a_qos_s_limits(oskar: User, resources: dict[str, Any], field: str, message: str) -> None:
    read()
    found = refusals(oskar, qos="small", **{"time_limit": "01:00:00", **resources})
    assert list(found) == [field]
    assert message in found[field]


def test_what_others_use_now_is_waited_for(oskar: User) -> None:
    read(QueuedJobInfo(scheduler_id="5", name="j", user="oskar", state="running", qos="small", gpus=8, partition="gpu"))
    assert refusals(oskar, qos="small", gpus_per_node=2, time_limit="01:00:00") == {}


def test_how_many_may_be_in_the_queue(oskar: User) -> None:
    queued_job_info = QueuedJobInfo(
        scheduler_id="5", name="j", user="oskar", state="pending", qos="small", account="vision"
    )
    read(queued_job_info)
    options = {"qos": "small", "time_limit": "01:00:00"}
    assert refusals(oskar, **options) == {}
    submit_spec(oskar, spec_of(resources=options))  # which the queue does not have yet
    assert refusals(oskar, **options) == {
        "qos": "QOS small lets a person have 2 jobs waiting and running at once; oskar has 2."
        " Submit it once one has ended, or cancel one."
    }
    read(
        *(
            QueuedJobInfo(scheduler_id=f"{n}", name="j", user="oskar", state="running", account="vision")
            for n in range(3)
        )
    )
    assert refusals(oskar)["project"].startswith(
        "Account vision lets a person have 3 jobs waiting and running at once;"
    )


def test_a_sweep_counts_with_all_its_jobs(oskar: User) -> None:
    read()
    data = {"name": "s", "sweep": {"over": {"run.seed": [1, 2, 3, 4]}}}
    spec = SweepSpec.parse(data, 'name = "s"\n[sweep.over]\n"run.seed" = [1, 2, 3, 4]\n')
    with pytest.raises(SpecError, match="waiting and running at once; oskar has 0; this job requests 4 more"):
        sweeps.submit(oskar, spec, spec_toml="")
    assert not Sweep.objects.exists()
    assert not Job.objects.exists()


def test_reservations(oskar: User) -> None:
    now = time.time()
    read()
    (message,) = refusals(oskar, reservation="workshop").values()
    assert re.fullmatch(r'Slurm has no reservation "workshop" \(as of .{5}\)\. It has none\. Remove it\.', message)
    read(
        reserved=(
            ReservationInfo(name="theirs", nodes=("dgx-01",), ends_at=now + 90_000, users=("mira",)),
            ReservationInfo(name="short", nodes=("dgx-01",), ends_at=now + 1830),
            ReservationInfo(name="lab", nodes=("dgx-01",), ends_at=now + 90_000, accounts=("lab",)),
        )
    )
    assert refusals(oskar, reservation="theirs")["reservation"] == "Reservation theirs is for others. Remove it."
    assert "has no reservation" in refusals(oskar, reservation="thiers")["reservation"]
    found = refusals(oskar, reservation="short", time_limit="01:00:00")["time_limit"]
    assert found.startswith("Reservation short ends in 30 min ")
    assert found.endswith("this job requests 1 h. Request 30 min at most.")
    assert "is over at" in refusals(oskar, reservation="short", time_limit="00:10:00", begin="+2h")["begin"]
    assert refusals(oskar, reservation="lab", time_limit="01:00:00") == {}


def test_a_single_error_for_a_type_of_gpu(oskar: User) -> None:
    read()
    (message,) = refusals(oskar, gpus_per_node=1, gpu_type="a100").values()
    assert re.fullmatch(r'Slurm has no GPU of type "a100" \(as of .{5}\)\. Did you mean "h100"\?', message)
    spec = spec_of(resources={"gpus_per_node": 1, "gpu_type": "a100"})
    with pytest.raises(SpecError) as caught:
        check(oskar, spec, code=None)
    assert len(caught.value.problems) == 1


def test_a_dry_run_names_when_it_may_begin(oskar: User) -> None:
    read()
    start = next(item for item in dry_run(oskar, spec_of(resources={"begin": "+2h"})) if item.title == "Start")
    assert start.text.startswith("Waits until ")
    assert "Starts now" not in start.text
    (finding,) = dry_run(oskar, spec_of(resources={"time_limit": "25:00:00"}))
    assert finding.level == "error"
    assert "resources.time_limit: Partition gpu limits jobs to" in finding.text


def test_without_limits_nothing_is_refused(oskar: User) -> None:
    options = {"qos": "small", "partition": "short", "reservation": "r", "time_limit": "90:00:00"}
    assert refusals(oskar, **options) == {}
    sync.read(ScriptedScheduler(broken=SchedulerError("Slurm does not answer")))
    assert refusals(oskar, **options) == {}
    sync.read(ScriptedScheduler(machines=[DGX_01]))  # one machine that plays all nodes knows no limits
    assert refusals(oskar, time_limit="90:00:00") == {}
