"""Faults of nodes are planted by an agent that allows it, judged by what rules made of them, and cleaned up after."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import pytest
from django.utils import timezone

from jobs.gameday import start as game_days
from jobs.gameday.advance import advance
from jobs.gameday.node_drills import LATE_REPORT, RETURN_TIMEOUT
from jobs.gameday.report import drill_reports, upgrades_since
from jobs.models import Drill, GameDay, Job
from nodes.models import Agent, HealthEntry, Node, NodeEvent, NodeOrder, SiteRule
from nodes.remediation.limits_used import automatic_drains
from nodes.telemetry import planting
from portal.models import AuditEntry, User
from tests.jobs.gameday.faults import NODE, Fault
from tests.lab import signed_in
from tests.nodes.remediation.cluster import Lab

pytestmark = pytest.mark.django_db
LONG = f"""
[[rule]]
name = "long"
title = "{"long" * 30}"
source = "a test"
severity = "warning"
action = "watch"
signal = "xid"
where = {{ code = 79 }}
clears = "person"
"""


def test_a_long_title_leaves_room_for_the_game_day(xid: Fault) -> None:
    """PostgreSQL refuses what SQLite stores: no rule was evaluated any more."""
    SiteRule.objects.create(name="long", toml=LONG)
    xid.xid(**xid.plant())
    xid.lab.step()
    title = xid.lab.entry("long").title
    assert len(title) == 120
    assert title.startswith("longlong")
    assert title.endswith("lon (injected by a game day)")


def test_an_xid_drains_the_node_and_the_game_day_returns_it(xid: Fault, ops: User) -> None:
    assert not Job.objects.exists(), "no job is needed for it"
    assert xid.request == {"id": xid.drill.pk, "fault": "xid", "seconds": 60}
    xid.xid(**xid.plant())
    assert xid.lab.scheduler.drained == {}
    xid.lab.step()
    reason = "[node] Xid 79 on GPU 0 (injected by a game day)"
    assert xid.lab.scheduler.drained == {NODE: f"{reason} (vigil: off-bus)"}
    assert xid.lab.entry().title == "GPU fell off the bus (injected by a game day)"
    assert automatic_drains(timezone.now()) == [], "a real fault may still be acted on within this hour"
    xid.advance(4)
    drill = xid.drill
    assert (drill.state, drill.detail) == ("passed", "")
    assert (drill.node, drill.driver, drill.slurm) == (NODE, "570.195.03", "24.11.5")
    assert (drill.cause, drill.is_cause_right, drill.is_action_right) == ("off-bus", True, True)
    assert drill.action == f"Drained by off-bus: {reason}."
    assert drill.noticed_s is not None
    assert drill.in_service_s is not None
    assert drill.noticed_s < drill.in_service_s
    assert xid.lab.scheduler.drained == {}
    assert (xid.lab.entry().state, xid.lab.entry().decided_by) == ("cleared", ops)
    assert xid.request is None
    xid.game_day.refresh_from_db()
    assert not xid.game_day.is_active
    assert AuditEntry.objects.filter(action="gameday.fault", thing=NODE, user=ops).exists()
    assert AuditEntry.objects.filter(action="drain", thing=NODE, detail=reason).exists()


def test_a_site_that_only_proposes_sees_a_proposal(xid: Fault, settings: Any) -> None:
    settings.VIGIL_HEALTH = "propose"
    xid.xid(**xid.plant())
    xid.lab.step()
    xid.advance(2)
    drill = xid.drill
    assert (drill.state, drill.in_service_s) == ("passed", None)
    assert drill.action == "Drain proposed. Vigil only proposes (VIGIL_HEALTH=propose)."
    assert xid.lab.entry().state == "cleared"
    assert not NodeOrder.objects.exists()


def test_real_evidence_is_never_cleared(xid: Fault) -> None:
    mark = xid.plant()
    xid.xid(**mark)
    xid.lab.step()
    assert automatic_drains(timezone.now()) == []
    xid.lab.xid(79, NODE, text="GPU has fallen off the bus, really.")
    xid.lab.step()
    entry = xid.lab.entry()
    assert (entry.is_planted, entry.title) == (False, "GPU fell off the bus")
    assert [drain.node for drain in automatic_drains(timezone.now())] == [NODE]
    xid.advance(4)
    assert xid.lab.entry().state == "open"
    assert NODE in xid.lab.scheduler.drained


def test_a_persons_drain_stays(xid: Fault) -> None:
    xid.xid(**xid.plant())
    xid.lab.step()
    xid.lab.scheduler.drain(NODE, "fan 3")
    xid.lab.step()
    xid.advance(3)
    assert xid.lab.scheduler.drained == {NODE: "fan 3"}
    NodeEvent.objects.filter(kind="fault.planted").update(
        data={"planted": xid.drill.pk, "planted_until": (timezone.now() - RETURN_TIMEOUT).timestamp() - 1}
    )
    xid.advance()
    assert xid.drill.state == "failed"
    assert xid.drill.detail.startswith(f"{NODE} is not back in service. ")
    assert xid.lab.scheduler.drained == {NODE: "fan 3"}


def test_a_hung_driver_must_end_before_it_is_cleared(lab: Lab, ops: User) -> None:
    fault = Fault(lab, ops, "nvml")
    advance()
    mark = fault.plant(lasts_s=100)
    lab.happens("gpu.silent", NODE, since=time.time() - 61, **mark)
    lab.step()
    assert lab.entry("nvml-hung").is_planted
    fault.advance(2)
    assert (fault.drill.state, fault.drill.cause) == ("running", "nvml-hung")
    assert lab.entry("nvml-hung").state == "open"
    lab.happens("gpu.answers", NODE, seconds=100, **mark)
    fault.advance(4)
    assert (fault.drill.state, fault.drill.detail) == ("passed", "")
    assert lab.scheduler.drained == {}


def test_a_driver_that_stays_silent_fails(lab: Lab, ops: User) -> None:
    fault = Fault(lab, ops, "nvml")
    advance()
    mark = fault.plant(lasts_s=100)
    lab.happens("gpu.silent", NODE, since=time.time() - 61, **mark)
    fault.advance()
    fault.advance()
    over = {"planted_until": (timezone.now() - RETURN_TIMEOUT).timestamp() - 1}
    for row in NodeEvent.objects.filter(kind__in=("fault.planted", "gpu.silent")):
        row.data |= over
        row.save()
    HealthEntry.objects.update(is_planted=False)  # as the next refresh of a lasting state does
    advance()
    assert fault.drill.state == "failed"
    assert "has not ended on dgx-01" in fault.drill.detail


def test_a_slow_mount_takes_no_node_out_of_service(lab: Lab, ops: User) -> None:
    mounted = {"mounts": [{"mount": "/data", "source": "nfs:/data"}]}
    for node in (NODE, "dgx-02", "dgx-03"):
        lab.machine(node).post(lab.machine(node).facts(time.time(), game_day=node == NODE, **mounted))
    fault = Fault(lab, ops, "mount")
    advance()
    mark = fault.plant(lasts_s=120)
    lab.happens("mount.slow", NODE, mount="/data", since=time.time() - 10, **mark)
    lab.step()
    lab.later(1.2)
    advance()
    lab.happens("mount.well", NODE, mount="/data", seconds=70, **mark)
    advance()
    drill = fault.drill
    assert (drill.state, drill.detail) == ("passed", "")
    assert (drill.cause, drill.action) == ("mount-slow", "Watched: no action on the node.")
    assert not NodeOrder.objects.exists()


def test_what_lasts_longer_than_it_was_planted_for_is_real(lab: Lab, ops: User) -> None:
    fault = Fault(lab, ops, "nvml")
    advance()
    mark = fault.plant(lasts_s=-61)
    lab.happens("gpu.silent", NODE, since=time.time() - 200, **mark)
    lab.step()
    assert not lab.entry("nvml-hung").is_planted


def test_a_planted_finding_does_not_count_towards_an_escalation(xid: Fault, ops: User) -> None:
    for is_first in (True, False):
        fault = xid if is_first else Fault(xid.lab, ops, "xid")
        advance()
        fault.xid(**fault.plant())
        fault.lab.step()
        fault.advance(4)
        assert fault.drill.state == "passed"
    xid.lab.xid(79, NODE, text="really")
    xid.lab.step()
    assert HealthEntry.objects.open().get().action == "drain", "and not replace, as after a second real one"


def test_no_rule_that_notices_it_fails(xid: Fault) -> None:
    xid.plant(lasts_s=-31)
    xid.advance()
    assert (xid.drill.state, xid.drill.detail) == ("failed", "No health rule noticed it.")


def test_an_agent_that_refuses_explains_why(xid: Fault) -> None:
    request = xid.request
    assert request is not None
    xid.lab.happens("fault.refused", NODE, planted=request["id"], text="This node has no GPU.")
    xid.advance()
    assert xid.drill.detail == f"Not tried: the agent of {NODE} refused. This node has no GPU."
    assert xid.request is None


def test_an_agent_that_does_nothing_fails_and_gets_no_more_requests(xid: Fault) -> None:
    Drill.objects.update(submitted_at=timezone.now() - planting.OFFERED_FOR - LATE_REPORT - timedelta(seconds=1))
    xid.advance()
    assert xid.drill.state == "failed"
    assert xid.drill.detail.startswith(f"The agent of {NODE} has not injected it after 2")
    assert xid.request is None


def test_a_request_ends_by_itself_if_no_worker_runs(xid: Fault) -> None:
    agent = Agent.objects.get(node=NODE)
    agent.plant["expires_at"] = time.time() - 1
    agent.save()
    assert xid.request is None


def test_a_cancelled_game_day_cleans_up(xid: Fault, ops: User) -> None:
    xid.xid(**xid.plant())
    xid.lab.step()
    game_days.cancel(ops, xid.game_day)
    xid.advance(4)
    assert (xid.drill.state, xid.drill.detail) == ("not tried", "Cancelled.")
    assert xid.lab.entry().state == "cleared"
    assert xid.lab.scheduler.drained == {}


def test_a_fault_that_is_reported_just_after_the_cancellation_is_cleaned_up(xid: Fault, ops: User) -> None:
    request = xid.request  # the agent has read it, and plants it
    assert request is not None
    game_days.cancel(ops, xid.game_day)
    xid.advance()
    assert (xid.drill.state, xid.request) == ("running", None)
    mark = {"planted": request["id"], "planted_until": time.time() + 60}
    xid.lab.happens("fault.planted", NODE, fault="xid", text="Planted.", **mark)
    xid.xid(**mark)
    xid.advance(4)
    assert (xid.drill.state, xid.drill.detail) == ("not tried", "Cancelled.")
    assert (xid.lab.entry().state, xid.lab.scheduler.drained) == ("cleared", {})


def test_a_cancelled_request_that_no_agent_read_ends(xid: Fault, ops: User) -> None:
    game_days.cancel(ops, xid.game_day)
    GameDay.objects.update(cancel_requested_at=timezone.now() - LATE_REPORT)
    xid.advance(2)
    xid.game_day.refresh_from_db()
    assert (xid.drill.detail, xid.game_day.is_active) == ("Cancelled.", False)


def test_a_drill_ends_though_an_agent_reports_that_its_fault_never_will(xid: Fault) -> None:
    xid.plant(lasts_s=10**9)
    Drill.objects.update(submitted_at=timezone.now() - timedelta(minutes=5))
    NodeEvent.objects.filter(kind="fault.planted").update(at=timezone.now() - timedelta(minutes=5))
    xid.advance()
    assert (xid.drill.state, xid.drill.detail) == ("failed", "No health rule noticed it.")


def test_a_job_that_starts_first_withdraws_the_request(xid: Fault) -> None:
    Node.objects.filter(name=NODE).update(state="mixed", cpus_used=4)
    advance()
    assert (xid.drill.state, xid.request) == ("running", None), "its agent may have read the request just before"
    Node.objects.filter(name=NODE).update(state="idle", cpus_used=0)
    Drill.objects.update(submitted_at=timezone.now() - planting.OFFERED_FOR - LATE_REPORT - timedelta(seconds=1))
    advance()
    assert xid.drill.state == "not tried"
    assert xid.drill.detail == f"A job started on {NODE} before the fault was injected."


def test_upgrades_since_are_named(xid: Fault, ops: User) -> None:
    xid.xid(**xid.plant())
    xid.lab.step()
    xid.advance(4)
    assert upgrades_since(xid.game_day) == []
    machine = xid.lab.machine(NODE)
    machine.post(machine.facts(time.time(), game_day=True, driver="580.1", slurm="26.05.0"))
    GameDay.objects.update(version="0.9")
    xid.game_day.refresh_from_db()
    found = upgrades_since(xid.game_day)
    assert "driver 570.195.03 → 580.1" in found
    assert "Slurm 24.11.5 → 26.05.0" in found
    assert any(text.startswith("Vigil 0.9 → ") for text in found)
    (report,) = drill_reports(xid.game_day)
    assert report.software == "Slurm 24.11.5, driver 570.195.03"
    page = signed_in(ops).get("/gameday").content.decode()
    assert "gpu · Vigil 0.9 · Slurm 24.11.5, driver 570.195.03" in page
    assert "Slurm 24.11.5 → 26.05.0" in page
