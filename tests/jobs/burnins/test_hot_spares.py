"""A hot spare stands by again after its burn-in, whatever came of it but a failure, and takes no job meanwhile."""

from __future__ import annotations

import pytest

from jobs.burnins.start import cancel
from nodes.drains import spares
from nodes.models import HotSpare, Node
from tests.jobs.burnins.simulated_cluster import SimulatedCluster, good_lines, line

pytestmark = pytest.mark.django_db
STANDBY = {"dgx-01": "[node] hot spare (vigil: spare)"}


@pytest.fixture
def cluster(cluster: SimulatedCluster) -> SimulatedCluster:
    spares.add(cluster.user, Node.objects.get(name="dgx-01"), "gpu")
    cluster.lab.step()
    assert cluster.lab.scheduler.drained == STANDBY
    return cluster


def takes_the_place_of_a_failed_node(cluster: SimulatedCluster) -> bool:
    cluster.set_node("dgx-02", state="down", reason="Not responding", reason_by="slurm")
    cluster.lab.step()
    return HotSpare.objects.filter(node="dgx-01", replaces="dgx-02").exists()


@pytest.mark.parametrize("is_cancelled", [True, False])
def test_stands_by_without_a_failure(cluster: SimulatedCluster, *, is_cancelled: bool) -> None:
    cluster.start()
    cluster.until_running()
    assert not cluster.lab.scheduler.drained
    if is_cancelled:
        cancel(cluster.user, cluster.burn_in)
        cluster.tick()
    else:
        cluster.write(good_lines())
    cluster.end_job("cancelled" if is_cancelled else "completed")
    cluster.until(lambda _: not cluster.lab.scheduler.reserved)
    assert cluster.lab.scheduler.drained == STANDBY, "before jobs can start there"
    cluster.until_ended()
    verdict = "inconclusive" if is_cancelled else "passed"
    assert (cluster.row().verdict, cluster.row().outcome) == (verdict, "Stands by as a hot spare.")
    cluster.lab.step()
    assert cluster.lab.scheduler.drained == STANDBY
    assert takes_the_place_of_a_failed_node(cluster)


def test_does_not_serve_after_a_failure(cluster: SimulatedCluster) -> None:
    cluster.start()
    cluster.until_running()
    cluster.write([*good_lines(), line("matrix", "GPU 0", outcome="failed", detail="products differ")])
    cluster.end_job()
    cluster.until_ended()
    assert cluster.row().verdict == "failed"
    assert "(vigil: burn-in)" in cluster.lab.scheduler.drained["dgx-01"]
    assert not takes_the_place_of_a_failed_node(cluster)


def test_a_persons_drain_from_before_stays_known_without_a_verdict(cluster: SimulatedCluster) -> None:
    cluster.lab.scheduler.drain("dgx-01", "broken fan")
    cluster.read_nodes()
    cluster.start(may_undrain=True)
    cluster.until_running()
    cancel(cluster.user, cluster.burn_in)
    cluster.tick()
    cluster.end_job("cancelled")
    cluster.until_ended()
    assert "before: broken fan" in cluster.lab.scheduler.drained["dgx-01"]
    assert not takes_the_place_of_a_failed_node(cluster)
