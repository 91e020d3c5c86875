"""A burn-in that cannot test its nodes is refused at once, with the reason."""

from __future__ import annotations

import pytest
from django.utils import timezone

from jobs.burnins.start import CannotBurnIn, cancel, start
from jobs.errors import Conflict
from nodes.models import BurnIn, Gpu
from portal.models import AuditEntry
from tests.jobs.burnins.simulated_cluster import SimulatedCluster, away, good_lines
from tests.lab import signed_in

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


@pytest.mark.parametrize("phase", ["late results", "returning"])
def test_what_has_no_tests_left_cannot_be_cancelled(cluster: SimulatedCluster, phase: str) -> None:
    cluster.start()
    cluster.until_running()
    client = signed_in(cluster.user)
    assert "cancel-button" in client.get(f"/burnins/{cluster.burn_in.pk}").text
    cluster.write(good_lines() if phase == "returning" else good_lines()[:-1])
    cluster.lab.scheduler.update_job(cluster.burn_in.scheduler_id, state="completed")
    cluster.lab.scheduler.broken_parts = {"unreserve": away()}
    cluster.tick(3)
    assert cluster.burn_in.state == ("returning" if phase == "returning" else "running")
    with pytest.raises(Conflict, match="has no tests left to stop"):
        cancel(cluster.user, cluster.burn_in)
    assert client.post(f"/api/v1/burnins/{cluster.burn_in.pk}/cancel").status_code == 409
    cluster.burn_in.refresh_from_db()
    assert cluster.burn_in.cancel_requested_at is None, "an acceptance would wait for no agents"
    assert not AuditEntry.objects.filter(action="burnin.cancelled").exists()
    assert "cancel-button" not in client.get(f"/burnins/{cluster.burn_in.pk}").text


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
