"""What says nothing about a node neither drains it nor lets it pass."""

from __future__ import annotations

from typing import Any

import pytest
from django.utils import timezone

from nodes.models import Gpu
from tests.jobs.burnins.simulated_cluster import SimulatedCluster, good_lines, line

pytestmark = pytest.mark.django_db
NO_TORCH = "ended with code 1: ModuleNotFoundError: No module named 'torch'"


def host_lines() -> list[dict[str, Any]]:
    """Return what a node without torch reports: the tests of devices cannot start, those of the host run."""
    start = line("start", "this node", outcome="failed", detail=NO_TORCH)
    items = (("host memory", "memory"), ("disk", "write /tmp"), ("disk", "read /tmp"), ("end", "this node"))
    return [start, *(line(test, item) for test, item in items)]


def cpu_lines() -> list[dict[str, Any]]:
    """Return what a node reports on which torch finds no GPU: the CPUs are tested instead."""
    cpus = (("memory", "CPUs"), ("matrix", "CPUs"), ("copy", "memory to memory"))
    facts, *others = good_lines(gpus=0)
    return [facts, *(line(test, item) for test, item in cpus), *others]


def judge(cluster: SimulatedCluster, lines: dict[str, list[dict[str, Any]]]) -> None:
    for node, found in lines.items():
        cluster.write(found, node)
    cluster.end_job()
    cluster.until_ended()


@pytest.mark.parametrize("nodes", [("dgx-01",), ("dgx-01", "dgx-02")])
def test_a_python_without_torch(cluster: SimulatedCluster, nodes: tuple[str, ...]) -> None:
    cluster.start(*nodes)
    cluster.until_running()
    judge(cluster, dict.fromkeys(nodes, host_lines()))
    assert cluster.lab.scheduler.drained == {}
    for node in nodes:
        assert (cluster.row(node).verdict, cluster.row(node).outcome) == ("inconclusive", "In service.")
        assert cluster.texts(node) == [f"The tests could not start: {NO_TORCH}."]


def test_a_node_alone_without_torch_fails(cluster: SimulatedCluster) -> None:
    cluster.start("dgx-01", "dgx-02")
    cluster.until_running()
    judge(cluster, {"dgx-01": good_lines(), "dgx-02": host_lines()})
    assert list(cluster.lab.scheduler.drained) == ["dgx-02"]


@pytest.mark.parametrize("is_gone", [False, True])
def test_gpus_that_only_the_agent_lists_were_not_tested(cluster: SimulatedCluster, is_gone: bool) -> None:
    cluster.lab.machine()
    cluster.set_node(gpus=0)
    cluster.start()
    assert cluster.row().gpus == 0
    cluster.until_running()
    if is_gone:  # the driver hangs during the tests
        Gpu.objects.update(gone_at=timezone.now())
    judge(cluster, {"dgx-01": cpu_lines()})
    assert (cluster.row().verdict, cluster.row().outcome) == ("inconclusive", "In service.")
    assert cluster.texts() == ["Its agent lists 2\N{NO-BREAK SPACE}GPUs, none of which was tested."]


def test_a_node_without_gpus_passes_on_its_cpus(cluster: SimulatedCluster) -> None:
    cluster.lab.machine()
    Gpu.objects.update(gone_at=timezone.now())  # taken out before the burn-in
    cluster.set_node(gpus=0)
    cluster.start()
    cluster.until_running()
    judge(cluster, {"dgx-01": cpu_lines()})
    assert cluster.row().verdict == "passed"
