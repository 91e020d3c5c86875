"""Test that a request which no node can satisfy is refused, unless the node is only out of service now."""

from __future__ import annotations

from typing import Any

import pytest

from jobs.submitting.node_capacity import capacity_problems
from nodes.cluster import sync
from nodes.schedulers.base import NodeStatus
from nodes.schedulers.cluster import PartitionInfo
from tests.jobs.schedulers import ScriptedScheduler
from tests.jobs.submissions import spec_of

pytestmark = pytest.mark.django_db


@pytest.fixture
def cluster() -> ScriptedScheduler:
    scheduler = ScriptedScheduler(
        machines=[
            NodeStatus(
                name=f"dgx-{n}", state=state, partitions=("gpu",), gpus=8, gpu_type="h100", cpus=128,
                features=("nvlink", f"rack{n % 2}"),
            )
            for n, state in enumerate(("idle", "drained", "down"))
        ]
        + [NodeStatus(name="old-1", state="idle", partitions=("old",), gpus=4, gpu_type="v100", cpus=64)],
        divided=[PartitionInfo(name="gpu", is_default=True), PartitionInfo(name="old")],
    )  # fmt: skip
    sync.read(scheduler)
    return scheduler


def refusals(**resources: Any) -> dict[str, str]:
    spec = spec_of(resources={"gpus_per_node": 1, **resources}, run={"global_batch": 3360})
    return {problem.field.removeprefix("resources."): problem.message for problem in capacity_problems(spec)}


def test_what_only_nodes_out_of_service_have_may_wait_for_them(cluster: ScriptedScheduler) -> None:
    assert refusals(nodes=3, gpus_per_node=8) == {}
    assert refusals(nodes=4, gpus_per_node=8) == {
        "nodes": "4 nodes are more than the 3 that fit the request. Request at most 3."
    }


def test_the_partition_decides_which_nodes_count(cluster: ScriptedScheduler) -> None:
    assert refusals(partition="old", gpus_per_node=4) == {}
    assert "the largest eligible node, old-1, has 4" in refusals(partition="old", gpus_per_node=8)["gpus_per_node"]
    assert refusals(partition="nowhere") == {}, "that is reported as an unknown name"


def test_gpu_type_and_features(cluster: ScriptedScheduler) -> None:
    assert refusals(gpu_type="H100", constraint="nvlink&rack1") == {}
    assert refusals(gpu_type="v100") == {
        "gpu_type": "No node that the job may use has GPUs of type v100. There are: h100."
    }
    assert refusals(partition="old", gpu_type="v100") == {}
    assert refusals(constraint="rack7")["constraint"].endswith("There are: nvlink, rack0, rack1.")
    assert refusals(constraint="rack1", nodes=2)["nodes"].endswith("Request at most 1.")
