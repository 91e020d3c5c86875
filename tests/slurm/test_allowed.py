"""Test that what a real Slurm refuses with error 2050, or never starts, is reported by field beforehand."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from jobs.errors import SpecError
from jobs.submitting.admission import check
from nodes.cluster import read, sync
from nodes.schedulers.base import SchedulerError, Submission
from nodes.schedulers.slurm.http import SlurmHttp
from nodes.schedulers.slurm.rest import SlurmRest
from nodes.schedulers.slurm.scheduler import Slurm
from nodes.schedulers.slurm.tokens import KeyFileTokens
from portal.models import Project, User
from tests.jobs.submissions import spec_of
from tests.lab import person
from tests.slurm.cluster import Cluster
from tests.slurm.people import ALICE, BOB, PORTAL

pytestmark = pytest.mark.django_db


@pytest.fixture
def rest(slurm: Cluster) -> Iterator[SlurmRest]:
    http = SlurmHttp(slurm.url, tokens=KeyFileTokens(slurm.layout.jwt_key), user=PORTAL)
    yield SlurmRest(http)
    http.close()


def fresh_scheduler(slurm: Cluster, rest: SlurmRest) -> Slurm:
    """Return a scheduler that remembers nothing of the queue."""
    return Slurm(rest, tokens=KeyFileTokens(slurm.layout.jwt_key), user=PORTAL)


@pytest.fixture
def narrow(slurm: Cluster) -> Iterator[None]:
    """A QOS with limits, one that sets the partition's aside, a reservation of bob's; alice may use both QOS."""
    slurm.run("sacctmgr", "-i", "add", "qos", "tight", "MaxWall=60", "MaxTRESPerJob=gres/gpu=2", "MaxSubmitJobs=1")
    slurm.run("sacctmgr", "-i", "add", "qos", "long", "Flags=PartitionTimeLimit")
    slurm.run("sacctmgr", "-i", "modify", "user", ALICE, "set", "qos+=tight,long")
    slurm.run(
        "scontrol", "create", "reservation", "reservationname=bobs", "starttime=now+10minutes", "duration=30",
        f"users={BOB}", "nodes=dgx04",
    )  # fmt: skip
    yield
    slurm.run("scontrol", "delete", "reservationname=bobs")
    slurm.run("sacctmgr", "-i", "modify", "user", ALICE, "set", "qos-=tight,long")
    slurm.run("sacctmgr", "-i", "delete", "qos", "tight,long")


def refusals(user: User, **resources: object) -> set[str]:
    try:
        check(user, spec_of(resources=resources, run={"global_batch": 3360}), code=None)
    except SpecError as error:
        return {problem.field.removeprefix("resources.") for problem in error.problems}
    return set()


def submission(qos: str) -> Submission:
    return Submission(
        key="00c0ffee00c0ffee", name="allowed", user=ALICE, script="/etc/hostname", directory="/tmp",
        output="/dev/null", time_limit_s=600, grace_s=30, qos=qos,
    )  # fmt: skip


def test_limits_and_reservations_are_read_beforehand(slurm: Cluster, rest: SlurmRest, narrow: None) -> None:
    alice = person("alice", Project.objects.create(slug="default", slurm_account="vision"), slurm_user=ALICE)
    sync.read(fresh_scheduler(slurm, rest))
    assert refusals(alice, time_limit="01:00:00") == set()
    assert refusals(alice, partition="short", time_limit="01:00:00") == {"time_limit"}
    assert refusals(alice, partition="short", time_limit="01:00:00", qos="long") == set()
    assert refusals(alice, qos="tight", gpus_per_node=4, time_limit="02:00:00") == {"time_limit", "gpus_per_node"}
    assert refusals(alice, reservation="bobs") == {"reservation"}
    assert refusals(alice, reservation="alices") == {"reservation"}

    held_job = slurm.run("sbatch", "--parsable", "--hold", "-q", "tight", "--wrap=true", user=ALICE).strip()
    try:
        with pytest.raises(SchedulerError) as caught:
            fresh_scheduler(slurm, rest).submit(submission("tight"))
        assert caught.value.number == 2050, "which names no field"
        sync.read(fresh_scheduler(slurm, rest))
        assert "tight" in {job.qos for job in read.read().queue}
        assert refusals(alice, qos="tight", time_limit="00:10:00") == {"qos"}
    finally:
        slurm.run("scancel", held_job)
