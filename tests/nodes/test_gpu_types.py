"""Test nodes with several types of GPU: each type is counted separately, everywhere."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import pytest
from django.test import Client
from hypothesis import given, settings
from hypothesis import strategies as st

from jobs.spec import JobSpec
from jobs.submitting import names, node_capacity
from nodes.cluster import sync
from nodes.models import Node, Reading
from nodes.schedulers.base import NodeStatus
from nodes.schedulers.cluster import PartitionInfo, QueuedJobInfo
from nodes.scheduling import gpu_types
from nodes.scheduling.backfill import after
from nodes.scheduling.capacity import ClusterCapacity, Request, assess, starts, survey
from tests.examples import examples
from tests.jobs.schedulers import ScriptedScheduler
from tests.lab import a_project, bearer, person, signed_in
from tests.nodes.slurm.simulated_rest import VERSIONS, SimulatedRest

TYPES = ("a100", "1g.10gb", "h100")
MIXED = NodeStatus(
    name="dgx-01", state="mixed", cpus=64, gpus=8, gpus_used=3, gpu_type="1g.10gb", memory_mib=512_000,
    gpus_by_type={"a100": 1, "1g.10gb": 7}, gpus_used_by_type={"1g.10gb": 3}, partitions=("gpu",),
)  # fmt: skip
PLAIN = NodeStatus(name="dgx-02", state="idle", cpus=64, gpus=8, gpu_type="h100", partitions=("gpu",))


def request(gpus: int, gpu_type: str = "", **options: Any) -> Request:
    return Request(**{"gpus": gpus, "gpu_type": gpu_type, "cpus": 1, "partition": "gpu", **options})


def cluster(*nodes: NodeStatus, **facts: Any) -> ClusterCapacity:
    return ClusterCapacity(
        now=1_000_000.0, nodes=nodes, partitions=(PartitionInfo(name="gpu", is_default=True),), **facts
    )


@st.composite
def nodes(draw: st.DrawFn) -> list[NodeStatus]:
    found = []
    for number in range(draw(st.integers(1, 4))):
        there = {kind: draw(st.integers(1, 4)) for kind in draw(st.lists(st.sampled_from(TYPES), unique=True))}
        used = {kind: draw(st.integers(0, count)) for kind, count in there.items()}
        several = len(there) > 1
        found.append(
            NodeStatus(
                name=f"n{number}", state="idle", cpus=64, partitions=("gpu",), gpus=sum(there.values()),
                gpus_used=sum(used.values()), gpu_type=max(there, key=lambda kind: there[kind], default=""),
                gpus_by_type=there if several else {}, gpus_used_by_type=used if several else {},
            )
        )  # fmt: skip
    return found


def left_of(node: NodeStatus, wanted: str) -> int:
    return gpu_types.count_of(gpu_types.free(node), wanted)


@settings(max_examples=examples(200), deadline=None)
@given(nodes(), st.integers(0, 5), st.sampled_from(["", "A100", *TYPES]), st.integers(1, 3))
def test_a_job_starts_where_enough_of_its_type_is_free(
    there: list[NodeStatus], gpus: int, wanted: str, many: int
) -> None:
    """Against counting by hand; a job without a type takes any."""
    where, requested = cluster(*there), request(gpus, wanted, min_nodes=many, max_nodes=many)
    candidates = survey(requested, where)
    fit = assess(requested, candidates, where)
    able = [node.name for node in there if left_of(node, wanted if gpus else "") >= gpus]
    ever = [
        node.name for node in there if gpu_types.count_of(gpu_types.installed(node), wanted if gpus else "") >= gpus
    ]
    assert set(fit.nodes) == set(able)
    assert (fit.starts, fit.can_ever_fit) == (len(able) >= many, len(ever) >= many)
    assert starts(requested, candidates, where) == fit.starts


@settings(max_examples=examples(200), deadline=None)
@given(nodes(), st.lists(st.tuples(st.integers(1, 4), st.sampled_from(["", *TYPES])), max_size=5))
def test_jobs_ahead_take_gpus_of_their_type(there: list[NodeStatus], wants: list[tuple[int, str]]) -> None:
    """Whoever finds room takes of its type alone, no type falls below zero, and the sum stays the sum of the types."""
    line = [
        QueuedJobInfo(
            scheduler_id=str(n), name="j", user="u", state="pending", partition="gpu", gpus=gpus, gpu_type=kind, cpus=1
        )
        for n, (gpus, kind) in enumerate(wants)
    ]  # fmt: skip
    ahead = after(line, cluster(*there))
    waiting = {job.scheduler_id for job in ahead.waiting}
    placed = [job for job in line if job.scheduler_id not in waiting]
    for room_left in ahead.left.values():
        assert all(count >= 0 for count in room_left.types.values())
        assert room_left.gpus == sum(room_left.types.values())
    for size in range(len(TYPES) + 1):
        for kinds in combinations(TYPES, size):
            before = sum(left_of(node, kind) for node in there for kind in kinds)
            remaining = sum(gpu_types.count_of(item.types, kind) for item in ahead.left.values() for kind in kinds)
            assert before - remaining >= sum(job.gpus for job in placed if job.gpu_type in kinds)
    total = sum(left_of(node, "") for node in there)
    assert total - sum(item.gpus for item in ahead.left.values()) == sum(job.gpus for job in placed)


@pytest.mark.parametrize("version", VERSIONS)
def test_slurm_reports_them_by_type(version: str) -> None:
    played = SimulatedRest(version)
    node = next(node for node in played.slurm.nodes() if node.name == "dgx08")
    assert (node.gpus, node.gpus_used, node.gpu_type) == (15, 3, "h100")
    assert dict(node.gpus_by_type) == {"h100": 8, "1g.10gb": 7}
    assert dict(node.gpus_used_by_type) == {"h100": 1, "1g.10gb": 2}
    job = next(job for job in played.slurm.queue() if job.name == "slices")
    assert (job.gpus, dict(job.gpus_by_type)) == (3, {"h100": 1, "1g.10gb": 2})
    assert job.gpu_indices == {"dgx08": (0, 8, 9)}


def spec(**resources: Any) -> JobSpec:
    return JobSpec.parse({"name": "gpt", "resources": {"ranks_per_node": 1, **resources}})


@pytest.fixture
def mixed(db: None) -> ScriptedScheduler:
    scheduler = ScriptedScheduler(
        machines=[MIXED, PLAIN], divided=[PartitionInfo(name="gpu", is_default=True, nodes=("dgx-01", "dgx-02"))]
    )
    scheduler.queued = [
        QueuedJobInfo(
            scheduler_id="7", name="both", user="mira", state="running", gpus=3, gpu_type="1g.10gb",
            gpus_by_type={"a100": 1, "1g.10gb": 2}, nodes=("dgx-01",), partition="gpu",
        )
    ]  # fmt: skip
    sync.read(scheduler)
    return scheduler


@pytest.mark.django_db
def test_the_rarer_type_may_be_requested(mixed: ScriptedScheduler) -> None:
    assert names._gpu_types() == {"a100", "1g.10gb", "h100"}
    assert node_capacity.capacity_problems(spec(gpu_type="a100", gpus_per_node=1)) == []
    assert node_capacity.capacity_problems(spec(gpu_type="1g.10gb", gpus_per_node=4)) == []
    (problem,) = node_capacity.capacity_problems(spec(gpu_type="a100", gpus_per_node=2))
    assert problem.field == "resources.gpus_per_node"
    assert "2\N{NO-BREAK SPACE}a100 GPUs are requested" in problem.message
    assert problem.message.endswith("dgx-01, has 1. Request at most 1.")


@pytest.mark.django_db
def test_pages_rest_and_the_map_count_each_type(mixed: ScriptedScheduler) -> None:
    mira = person("mira", a_project())
    client: Client = signed_in(mira)
    nodes_page = client.get("/nodes").content.decode()
    assert "1 of 1 a100, 4 of 7 1g.10gb free" in nodes_page
    assert "13 of 16\N{NO-BREAK SPACE}GPUs: 4 1g.10gb, 1 a100, 8 h100." in nodes_page
    assert "1 a100, 7 1g.10gb" in client.get("/nodes/dgx-01").content.decode()
    assert "1 a100, 2 1g.10gb" in client.get("/queue").content.decode()
    answer = bearer(mira).get("/api/v1/nodes/dgx-01").json()
    assert answer["gpu_types"] == [
        {"type": "a100", "gpus": 1, "used": 0, "free": 1},
        {"type": "1g.10gb", "gpus": 7, "used": 3, "free": 4},
    ]
    assert bearer(mira).get("/api/v1/queue").json()["items"][0]["gpus_by_type"] == {"a100": 1, "1g.10gb": 2}
    Node.objects.filter(name="dgx-01").update(state="drained")
    drained = bearer(mira).get("/api/v1/nodes/dgx-01").json()["gpu_types"]
    assert [item["free"] for item in drained] == [0, 0]
    assert sync.readings()[Reading.Part.NODES].unreadable == 0
