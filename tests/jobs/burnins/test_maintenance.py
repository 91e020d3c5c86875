"""A node in maintenance is not tested, and none returns to service by a burn-in while somebody works on it."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from django.test import Client

from jobs.burnins.start import start
from jobs.errors import Conflict
from nodes.drains import maintenance
from nodes.models import BurnIn, MaintenanceWindow
from tests.jobs.burnins.simulated_cluster import SimulatedCluster, away
from tests.lab import signed_in
from tests.nodes.drains.windows import at, planned

pytestmark = pytest.mark.django_db


@pytest.fixture
def client(cluster: SimulatedCluster) -> Client:
    return signed_in(cluster.user)


def test_a_node_in_maintenance_is_refused_until_the_window_is_over(cluster: SimulatedCluster) -> None:
    window = planned(cluster.user, "dgx-01")
    at(cluster.lab)
    with pytest.raises(Conflict, match="Not started: dgx-01 is in maintenance until .*. Test it afterwards, or end"):
        start(cluster.user, ["dgx-01", "dgx-02"], 60)
    assert not BurnIn.objects.exists()
    start(cluster.user, ["dgx-02"], 60)
    maintenance.cancel(cluster.user, window)
    start(cluster.user, ["dgx-01"], 60)


def test_a_window_that_has_not_begun_refuses_nothing(cluster: SimulatedCluster) -> None:
    planned(cluster.user, "dgx-01", starts=10)
    start(cluster.user, ["dgx-01"], 60)


@pytest.mark.parametrize(
    ("address", "body"),
    [("burnins", {"nodes": ["dgx-01"], "may_undrain": True}), ("acceptances", {"nodes": "dgx-01"})],
)
def test_over_rest(cluster: SimulatedCluster, client: Client, address: str, body: dict[str, Any]) -> None:
    planned(cluster.user, "dgx-01", wants_reservation=True)
    refused = client.post(f"/api/v1/{address}", body, content_type="application/json")
    assert (refused.status_code, "dgx-01 is in maintenance until" in refused.json()["detail"]) == (409, True)
    assert not BurnIn.objects.exists()


@pytest.mark.parametrize("address", ["burnins", "acceptances"])
def test_on_pages(cluster: SimulatedCluster, client: Client, address: str) -> None:
    planned(cluster.user, "dgx-01")
    refused = client.post(f"/{address}/start", {"nodes": "dgx-[01-02]", "seconds": "60"})
    assert refused.status_code == 409
    assert "Not started: dgx-01 is in maintenance until" in refused.text
    assert not BurnIn.objects.exists()


def test_a_window_that_begins_while_the_burn_in_waits_ends_it(cluster: SimulatedCluster) -> None:
    cluster.set_node(state="allocated", cpus_used=8)
    cluster.start("dgx-01", "dgx-02")
    cluster.tick(2)
    assert cluster.burn_in.state == "waiting"
    window = planned(cluster.user, "dgx-01")
    cluster.until_ended()
    assert cluster.burn_in.problem.startswith("dgx-01 is in maintenance until ")
    assert not cluster.lab.scheduler.submissions
    at(cluster.lab)
    assert window.requester in cluster.lab.scheduler.drained["dgx-01"]


@pytest.mark.parametrize("is_sent", [True, False])
def test_a_window_that_begins_while_nodes_are_undrained(cluster: SimulatedCluster, is_sent: bool) -> None:
    cluster.lab.scheduler.drain("dgx-01", "fan 3")
    cluster.read_nodes()
    cluster.start(may_undrain=True)
    cluster.until(lambda burn_in: burn_in.state == "starting")
    if not is_sent:
        cluster.lab.scheduler.broken_parts = {"undrain": away()}
    cluster.tick()
    assert not cluster.lab.scheduler.submissions
    planned(cluster.user, "dgx-01")
    at(cluster.lab)
    cluster.until_ended()
    at(cluster.lab, 61)
    reason = cluster.lab.scheduler.drained["dgx-01"]
    assert reason == "fan 3" or reason.endswith("before: fan 3 (vigil: burn-in)")
    assert not cluster.lab.scheduler.submissions


def test_a_window_that_begins_before_the_scheduler_starts_the_tests_cancels_them(cluster: SimulatedCluster) -> None:
    cluster.start()
    cluster.until(lambda burn_in: burn_in.state == "running")
    cluster.tick()
    window = planned(cluster.user, "dgx-01")
    cluster.tick()
    assert cluster.lab.scheduler.cancelled == [cluster.burn_in.scheduler_id]
    cluster.end_job("cancelled")
    cluster.until_ended()
    at(cluster.lab)
    assert window.requester in cluster.lab.scheduler.drained["dgx-01"]


def test_a_burn_in_that_waits_goes_on_before_the_window(cluster: SimulatedCluster) -> None:
    planned(cluster.user, "dgx-01", starts=10)
    cluster.start()
    cluster.until_running()
    MaintenanceWindow.objects.update(starts_at=MaintenanceWindow.objects.get().starts_at - timedelta(minutes=20))
    assert cluster.tick(2).problem == "", "jobs that run at the start continue into the window"
