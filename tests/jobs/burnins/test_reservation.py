"""A burn-in undrains nodes only inside its own reservation, whatever else has its number, and removes no other."""

from __future__ import annotations

from dataclasses import replace

import pytest

from nodes.schedulers.cluster import ReservationInfo
from tests.jobs.burnins.simulated_cluster import SimulatedCluster, good_lines

pytestmark = pytest.mark.django_db


def drain_by_rule(cluster: SimulatedCluster) -> None:
    cluster.lab.xid(79)
    cluster.lab.step()
    assert cluster.lab.scheduler.drained


def finish(cluster: SimulatedCluster) -> None:
    cluster.write(good_lines())
    cluster.end_job()
    cluster.until_ended()
    assert cluster.row().outcome == "In service."


def test_a_reservation_with_the_same_number_of_other_nodes_is_left_alone(cluster: SimulatedCluster) -> None:
    """Another portal made it, or this one before its database was restored."""
    drain_by_rule(cluster)
    cluster.start()
    other = ReservationInfo(name=f"vigil_burnin_{cluster.burn_in.pk}", nodes=("dgx-07",))
    cluster.lab.scheduler.reserved = [other]
    cluster.until_running()
    reserved = {reservation.name: reservation.nodes for reservation in cluster.lab.scheduler.reserved}
    assert reserved[cluster.lab.scheduler.submissions[0].reservation] == ("dgx-01",)
    finish(cluster)
    assert cluster.lab.scheduler.reserved == [other]


@pytest.mark.parametrize("state", ["waiting", "running"])
def test_a_reservation_of_an_earlier_version_is_used_and_removed(cluster: SimulatedCluster, state: str) -> None:
    drain_by_rule(cluster)
    cluster.start()
    cluster.tick() if state == "waiting" else cluster.until_running()
    assert cluster.burn_in.state == state
    name = f"vigil_burnin_{cluster.burn_in.pk}"
    cluster.lab.scheduler.reserved = [replace(found, name=name) for found in cluster.lab.scheduler.reserved]
    if state == "waiting":
        cluster.until_running()
        assert cluster.lab.scheduler.submissions[0].reservation == name
    assert [reservation.name for reservation in cluster.lab.scheduler.reserved] == [name]
    finish(cluster)
    assert not cluster.lab.scheduler.reserved


def test_a_reservation_that_was_deleted_is_made_again_before_a_node_is_undrained(cluster: SimulatedCluster) -> None:
    drain_by_rule(cluster)
    cluster.set_node(state="draining")
    cluster.start()
    cluster.tick(3)
    assert cluster.burn_in.detail == "Waits for jobs on dgx-01 to end."
    cluster.lab.scheduler.reserved.clear()
    cluster.lab.scheduler.requests.clear()
    cluster.set_node(state="drained")
    cluster.until_running()
    order = [part for part in cluster.lab.scheduler.requests if part in ("reserve", "undrain")]
    assert order[:2] == ["reserve", "undrain"]
    finish(cluster)


def test_a_reservation_that_was_deleted_after_the_undrain_is_made_again_for_the_tests(
    cluster: SimulatedCluster,
) -> None:
    drain_by_rule(cluster)
    cluster.start()
    cluster.until(lambda _: "undrain" in cluster.lab.scheduler.requests)
    cluster.lab.scheduler.reserved.clear()
    cluster.until_running()
    names = [reservation.name for reservation in cluster.lab.scheduler.reserved]
    assert names == [cluster.lab.scheduler.submissions[0].reservation]
