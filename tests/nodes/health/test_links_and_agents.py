"""Flapping links drain their node; many silent agents are one finding about the cluster and drain none."""

from __future__ import annotations

from datetime import timedelta

import pytest
from django.utils import timezone

from nodes.models import Agent, HealthEntry, NodeEvent
from tests.lab import bearer, signed_in, sysadmin
from tests.nodes.remediation.cluster import NAMES, Lab, evaluate_until

pytestmark = pytest.mark.django_db


def test_a_link_that_went_down_three_times_drains_its_node(lab: Lab) -> None:
    for ago in (400, 200):
        lab.happens("link.down", ago=ago, port="mlx5_0/1", count=1)
    lab.happens("link.down", ago=100, port="mlx5_1/1", count=1)
    lab.step()
    assert NodeEvent.objects.filter(kind="link.down").count() == 2, "one row a port"
    assert not lab.scheduler.drained, "two of one port, one of another"
    lab.happens("link.down", ago=10, port="mlx5_0/1", count=1)
    lab.step()
    entry = HealthEntry.objects.open().get()
    assert (entry.rule, entry.item, entry.count) == ("port-flapping", "mlx5_0/1", 3)
    reason = "[node] InfiniBand link goes down again and again (mlx5_0/1) (vigil: port-flapping)"
    assert lab.scheduler.drained == {"dgx-01": reason}


@pytest.mark.parametrize("is_boot", [True, False])
def test_counters_from_before_a_repair_do_not_count(lab: Lab, is_boot: bool) -> None:
    """The event comes at once, the new counters up to ten seconds later."""
    machine = lab.machine()
    lab.happens("gpu.counters", gpu=machine.gpus[0], recovery_action=1)
    lab.step()
    lab.later(0.5)
    assert rules() == [("driver-wants-reset", "dgx-01")]
    machine.boot_id = "b2" if is_boot else machine.boot_id
    lab.happens("boot" if is_boot else "driver.reloaded", ago=-40)
    lab.later(0.7)
    assert rules() == []
    lab.happens("gpu.counters", gpu=machine.gpus[0], recovery_action=0)
    lab.later(0.8)
    assert not HealthEntry.objects.active().exists()


def silence(*nodes: str, minutes: float) -> None:
    Agent.objects.filter(node__in=nodes).update(heard_at=timezone.now() - timedelta(minutes=minutes))


def still_silent(seconds: int) -> None:
    evaluate_until(timezone.now() + timedelta(seconds=seconds), silent=NAMES)


def rules() -> list[tuple[str, str]]:
    return [(entry.rule, entry.node) for entry in HealthEntry.objects.open().order_by("rule", "node")]


def test_many_silent_agents_are_a_single_finding_about_the_cluster(lab: Lab) -> None:
    for name in NAMES:
        lab.machine(name)
    silence(*NAMES[:10], minutes=10)
    lab.step()
    assert rules() == [], "a portal that was away for a while hears from them within two minutes"
    still_silent(125)
    assert rules() == [("agents-silent", "")]
    ops = sysadmin("ops")
    page = signed_in(ops).get("/health").content.decode()
    assert "Many agents do not report" in page
    assert "the cluster" in page
    (item,) = bearer(ops, "read").get("/api/v1/health").json()["items"]
    assert (item["node"], item["evidence"][0]["fields"]["agents"]) == ("", 12)
    lab.step()
    assert not lab.scheduler.drained


def test_agents_that_report_again_end_it(lab: Lab) -> None:
    for name in NAMES:
        lab.machine(name)
    silence(*NAMES, minutes=10)
    lab.step()
    still_silent(125)
    assert rules() == [("agents-silent", "")]
    evaluate_until(timezone.now() + timedelta(minutes=9), timezone.now() + timedelta(minutes=3))
    assert rules() == []


@pytest.mark.parametrize("nodes", [2, 12])
def test_a_single_silent_agent_is_a_finding_about_its_node_however_small_the_cluster(lab: Lab, nodes: int) -> None:
    for name in NAMES[:nodes]:
        lab.machine(name)
    silence("dgx-01", minutes=10)
    lab.step()
    assert rules() == [], "an agent whose portal was away reports within a minute"
    still_silent(61)
    assert rules() == [("agent-silent", "dgx-01")]
