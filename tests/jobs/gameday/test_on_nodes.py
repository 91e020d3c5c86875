"""Faults of nodes are planted by an agent that allows it, judged by what rules made of them, and cleaned up after."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import pytest
from django.utils import timezone

from jobs.burnins import start as burn_ins
from jobs.gameday import start as game_days
from jobs.gameday.advance import advance
from jobs.gameday.leftovers import AFTER
from jobs.gameday.on_nodes import FOR_A_NODE, FOR_RETURN, HOW_TO, LATE_REPORT, begin
from jobs.gameday.report import drill_reports, upgrades_since
from jobs.models import Drill, GameDay, Job
from nodes.models import Agent, HealthEntry, Node, NodeEvent, NodeOrder, Partition, SiteRule
from nodes.remediation.limits_used import automatic_drains
from nodes.telemetry import planting
from portal.models import AuditEntry, Membership, User
from tests.lab import a_project, signed_in, sysadmin
from tests.nodes.remediation.cluster import Lab

pytestmark = pytest.mark.django_db
NODE = "dgx-01"
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


@pytest.fixture
def ops() -> User:
    user = sysadmin("ops")
    Membership.objects.create(user=user, project=a_project("canaries"), role="researcher")
    return user


@pytest.fixture
def lab(settings: Any) -> Lab:
    settings.VIGIL_HEALTH = "act"
    lab = Lab()
    machine = lab.machine(NODE)
    machine.post(machine.facts(time.time(), game_day=True, slurm="24.11.5"))
    return lab


class Fault:
    """A game day of one fault, and the agent that plants it."""

    def __init__(self, lab: Lab, ops: User, fault: str) -> None:
        self.lab, self.game_day = lab, game_days.start(ops, "canaries", "gpu", [fault])

    @property
    def drill(self) -> Drill:
        return self.game_day.drills.get()

    @property
    def request(self) -> dict[str, Any] | None:
        """Return what the answer to the agent's next post asks for."""
        answer = self.lab.machine(NODE).post()
        return dict(answer.json()).get("plant")  # type: ignore[no-any-return]

    def plant(self, *, lasts_s: float = 60) -> dict[str, Any]:
        """Do what the agent does; return the fields that mark what follows from it."""
        request = self.request
        assert request is not None
        mark = {"planted": request["id"], "planted_until": time.time() + lasts_s}
        self.lab.happens("fault.planted", NODE, fault=request["fault"], text="Planted.", **mark)
        return mark

    def xid(self, **mark: Any) -> None:
        self.lab.seq += 1
        gpu, seq = self.lab.machine(NODE).gpus[0], self.lab.seq
        about = {"xid": 79, "seq": seq, "text": f"GPU has fallen off the bus. {'x' * seq}", "gpu": gpu}
        self.lab.happens("xid", NODE, **about, **mark)

    def advance(self, times: int = 1) -> None:
        for _ in range(times):
            advance()
            self.lab.step()


@pytest.fixture
def xid(lab: Lab, ops: User) -> Fault:
    found = Fault(lab, ops, "xid")
    advance()
    return found


def test_a_long_title_leaves_room_for_the_game_day(xid: Fault) -> None:
    """PostgreSQL refuses what SQLite stores: no rule was evaluated any more."""
    SiteRule.objects.create(name="long", toml=LONG)
    xid.xid(**xid.plant())
    xid.lab.step()
    title = xid.lab.entry("long").title
    assert len(title) == 120
    assert title.endswith("long (planted by a game day)")


def test_an_xid_drains_the_node_and_the_game_day_returns_it(xid: Fault, ops: User) -> None:
    assert not Job.objects.exists(), "no job is needed for it"
    assert xid.request == {"id": xid.drill.pk, "fault": "xid", "seconds": 60}
    xid.xid(**xid.plant())
    assert xid.lab.scheduler.drained == {}
    xid.lab.step()
    reason = "[node] Xid 79 on GPU 0 (planted by a game day)"
    assert xid.lab.scheduler.drained == {NODE: f"{reason} (vigil: off-bus)"}
    assert xid.lab.entry().title == "GPU fell off the bus (planted by a game day)"
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
    xid.lab.xid(79, NODE, text="GPU has fallen off the bus, really.")
    xid.lab.step()
    entry = xid.lab.entry()
    assert (entry.is_planted, entry.title) == (False, "GPU fell off the bus")
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
        data={"planted": xid.drill.pk, "planted_until": (timezone.now() - FOR_RETURN).timestamp() - 1}
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
    over = {"planted_until": (timezone.now() - FOR_RETURN).timestamp() - 1}
    for row in NodeEvent.objects.filter(kind__in=("fault.planted", "gpu.silent")):
        row.data |= over
        row.save()
    HealthEntry.objects.update(is_planted=False)  # as the next refresh of a state that lasts does
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


def test_an_agent_that_refuses_says_why(xid: Fault) -> None:
    request = xid.request
    assert request is not None
    xid.lab.happens("fault.refused", NODE, planted=request["id"], text="This node has no GPU.")
    xid.advance()
    assert xid.drill.detail == f"Not tried: the agent of {NODE} refused. This node has no GPU."
    assert xid.request is None


def test_an_agent_that_does_nothing_fails_and_is_asked_no_more(xid: Fault) -> None:
    Drill.objects.update(submitted_at=timezone.now() - planting.OFFERED_FOR - LATE_REPORT - timedelta(seconds=1))
    xid.advance()
    assert xid.drill.state == "failed"
    assert xid.drill.detail.startswith(f"The agent of {NODE} has not planted it after 2")
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


class TestAfterTheDrill:
    """What a drill no longer follows is cleared, and the node returns."""

    @pytest.fixture
    def late(self, xid: Fault) -> Fault:
        """Return a fault whose agent plants it, and whose health rule has not noticed it by the end of the drill."""
        mark = xid.plant(lasts_s=-31)
        xid.advance()
        assert xid.drill.state == "failed"
        xid.xid(**mark | {"planted_until": time.time() + 60})
        return xid

    def returns(self, fault: Fault) -> None:
        fault.lab.step()
        assert NODE in fault.lab.scheduler.drained
        fault.advance()
        assert fault.lab.entry().state == "open", "it may still be noticed by a drill that runs"
        HealthEntry.objects.update(last_seen=timezone.now() - AFTER)
        fault.advance(2)
        assert (fault.lab.entry().state, fault.lab.scheduler.drained) == ("cleared", {})

    def test_a_rule_that_notices_it_late(self, late: Fault) -> None:
        self.returns(late)

    def test_an_agent_that_reports_it_late(self, xid: Fault) -> None:
        Drill.objects.update(submitted_at=timezone.now() - planting.OFFERED_FOR - LATE_REPORT - timedelta(seconds=1))
        number = xid.drill.pk
        xid.advance()
        assert xid.drill.state == "failed"
        mark = {"planted": number, "planted_until": time.time() + 60}
        xid.lab.happens("fault.planted", NODE, fault="xid", text="Planted.", **mark)
        xid.xid(**mark)
        self.returns(xid)

    def test_a_game_day_that_was_deleted(self, xid: Fault) -> None:
        xid.xid(**xid.plant())
        GameDay.objects.all().delete()
        self.returns(xid)

    def test_real_evidence_stays(self, late: Fault) -> None:
        late.lab.xid(79, NODE, text="GPU has fallen off the bus, really.")
        late.lab.step()
        HealthEntry.objects.update(last_seen=timezone.now() - AFTER)
        late.advance(2)
        assert late.lab.entry().state == "open"
        assert NODE in late.lab.scheduler.drained


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
    assert xid.drill.detail == f"A job started on {NODE} before the fault was planted."


class TestWhereItIsPlanted:
    def test_not_where_another_drill_runs(self, xid: Fault, ops: User) -> None:
        planting.withdraw(NODE, xid.drill.pk)
        Partition.objects.create(name="other", nodes=[NODE])
        other = game_days.start(ops, "canaries", "other", ["mount"])
        advance()
        assert other.drills.get().detail == f"Waits for a node: {NODE} has another planted fault."

    def test_nowhere_without_the_setting(self, lab: Lab, ops: User) -> None:
        lab.machine(NODE).post(lab.machine(NODE).facts(time.time()))
        fault = Fault(lab, ops, "xid")
        advance()
        assert fault.drill.state == "not tried"
        assert fault.drill.detail == f"Not tried: no agent on gpu lets game days plant faults. {HOW_TO}"
        assert HOW_TO in signed_in(ops).get("/gameday").content.decode()

    @pytest.mark.parametrize(
        ("change", "problem"),
        [
            ({"state": "allocated"}, "runs jobs"),
            ({"state": "mixed", "cpus_used": 4}, "runs jobs"),
            ({"state": "drained", "reason": "fan"}, "is out of service"),
        ],
    )
    def test_never_beside_somebodys_job(self, lab: Lab, ops: User, change: dict[str, Any], problem: str) -> None:
        Node.objects.filter(name=NODE).update(**change)
        fault = Fault(lab, ops, "xid")
        advance()
        assert fault.drill.state == "waiting"
        assert fault.request is None
        Drill.objects.update(submitted_at=timezone.now() - FOR_A_NODE - timedelta(seconds=1))
        advance()
        assert (fault.drill.state, fault.drill.detail) == ("not tried", f"Not tried: {NODE} {problem}.")

    def test_not_on_a_node_in_a_burn_in(self, lab: Lab, ops: User) -> None:
        burn_ins.start(ops, [NODE], 60)
        fault = Fault(lab, ops, "xid")
        advance()
        assert (fault.request, fault.drill.detail) == (None, f"Waits for a node: {NODE} is in a burn-in.")

    def test_not_where_something_is_found_already(self, lab: Lab, ops: User) -> None:
        lab.xid(48, NODE)
        lab.step()
        Node.objects.filter(name=NODE).update(state="idle", reason="")
        fault = Fault(lab, ops, "xid")
        advance()
        assert (fault.drill.state, fault.request) == ("waiting", None)
        assert fault.drill.detail.startswith(f"Waits for a node: {NODE} has a finding of its own: ")

    def test_but_beside_findings_that_take_no_node_out_of_service(self, lab: Lab, ops: User) -> None:
        lab.happens("mount.slow", NODE, mount="/data", since=time.time() - 100)
        lab.machine(NODE).post(
            lab.machine(NODE).facts(time.time(), game_day=True, mounts=[{"mount": "/data", "source": "nfs"}])
        )
        lab.step()
        assert HealthEntry.objects.active().filter(node=NODE).exists()
        fault = Fault(lab, ops, "xid")
        advance()
        assert fault.drill.state == "running"

    def test_two_workers_ask_once(self, xid: Fault) -> None:
        drill = xid.drill
        drill.state = Drill.DrillState.WAITING  # as another worker has read it
        begin(xid.game_day, drill)
        assert xid.request == {"id": drill.pk, "fault": "xid", "seconds": 60}
        assert AuditEntry.objects.filter(action="gameday.fault").count() == 1

    def test_two_workers_ask_one_node(self, lab: Lab, xid: Fault) -> None:
        other = lab.machine("dgx-02")
        other.post(other.facts(time.time(), game_day=True))
        drill = xid.drill
        drill.state = Drill.DrillState.WAITING  # as another worker has read it
        begin(xid.game_day, drill)
        assert "plant" not in other.post().json()
        assert xid.request is not None


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
