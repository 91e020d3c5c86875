"""A burn-in that cannot test its nodes is refused at once, with the reason."""

from __future__ import annotations

import pytest
from django.utils import timezone

from jobs.burnins.start import CannotBurnIn, cancel, start
from jobs.errors import Conflict
from nodes.models import BurnIn, Gpu
from tests.jobs.burnins.simulated_cluster import SimulatedCluster

pytestmark = pytest.mark.django_db


def test_the_second_burn_in_of_a_node_is_refused(cluster: SimulatedCluster) -> None:
    cluster.start("dgx-01", "dgx-02")
    with pytest.raises(Conflict, match="dgx-02 is being tested by burn-in"):
        start(cluster.user, ["dgx-02", "dgx-03"], 60)
    assert BurnIn.objects.count() == 1
    pass_or_cancel(cluster)
    start(cluster.user, ["dgx-02"], 60)


def pass_or_cancel(cluster: SimulatedCluster) -> None:
    cancel(cluster.user, cluster.burn_in)
    cluster.until_ended()


@pytest.mark.parametrize("seconds", [0, 59, 48 * 3600 + 1, -1])
def test_refuses_a_duration(cluster: SimulatedCluster, seconds: int) -> None:
    with pytest.raises(CannotBurnIn):
        cluster.start(seconds=seconds)


def test_refuses_unknown_nodes(cluster: SimulatedCluster) -> None:
    with pytest.raises(CannotBurnIn, match="dgx-99"):
        cluster.start("dgx-99")
    with pytest.raises(CannotBurnIn):
        start(cluster.user, [], 60)


def test_refuses_gpus_in_mig_mode(cluster: SimulatedCluster) -> None:
    cluster.lab.machine()
    Gpu.objects.filter(index=1).update(has_mig=True)
    with pytest.raises(CannotBurnIn, match="The GPUs of dgx-01 are cut into MIG slices"):
        cluster.start("dgx-01", "dgx-02")
    Gpu.objects.filter(index=1).update(gone_at=timezone.now())
    cluster.start("dgx-01", "dgx-02")
