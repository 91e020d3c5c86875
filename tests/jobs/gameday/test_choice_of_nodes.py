"""Test that faults are planted only on idle nodes with agents that allow it, alongside nobody's work."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import pytest
from django.utils import timezone

from jobs.burnins import start as burn_ins
from jobs.gameday import start as game_days
from jobs.gameday.advance import advance
from jobs.gameday.node_drills import HOW_TO, IDLE_NODE_TIMEOUT, begin
from jobs.models import Drill
from nodes.models import HealthEntry, Node, Partition
from nodes.telemetry import planting
from portal.models import AuditEntry, User
from tests.jobs.gameday.faults import NODE, Fault
from tests.lab import signed_in
from tests.nodes.remediation.cluster import Lab

pytestmark = pytest.mark.django_db


class TestWhereItIsPlanted:
    def test_not_where_another_drill_runs(self, xid: Fault, ops: User) -> None:
        planting.withdraw(NODE, xid.drill.pk)
        Partition.objects.create(name="other", nodes=[NODE])
        other = game_days.start(ops, "canaries", "other", ["mount"])
        advance()
        assert other.drills.get().detail == f"Waits for a node: {NODE} has another injected fault."

    def test_nowhere_without_the_setting(self, lab: Lab, ops: User) -> None:
        lab.machine(NODE).post(lab.machine(NODE).facts(time.time()))
        fault = Fault(lab, ops, "xid")
        advance()
        assert fault.drill.state == "not tried"
        assert fault.drill.detail == f"Not tried: no agent on gpu lets game days inject faults. {HOW_TO}"
        assert HOW_TO in signed_in(ops).get("/gameday").content.decode()

    @pytest.mark.parametrize(
        ("change", "problem"),
        [
            ({"state": "allocated"}, "runs jobs"),
            ({"state": "mixed", "cpus_used": 4}, "runs jobs"),
            ({"state": "drained", "reason": "fan"}, "is out of service"),
        ],
    )
    def test_never_alongside_somebodys_job(self, lab: Lab, ops: User, change: dict[str, Any], problem: str) -> None:
        Node.objects.filter(name=NODE).update(**change)
        fault = Fault(lab, ops, "xid")
        advance()
        assert fault.drill.state == "waiting"
        assert fault.request is None
        Drill.objects.update(submitted_at=timezone.now() - IDLE_NODE_TIMEOUT - timedelta(seconds=1))
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

    def test_but_alongside_findings_that_take_no_node_out_of_service(self, lab: Lab, ops: User) -> None:
        lab.happens("mount.slow", NODE, mount="/data", since=time.time() - 100)
        lab.machine(NODE).post(
            lab.machine(NODE).facts(time.time(), game_day=True, mounts=[{"mount": "/data", "source": "nfs"}])
        )
        lab.step()
        assert HealthEntry.objects.active().filter(node=NODE).exists()
        fault = Fault(lab, ops, "xid")
        advance()
        assert fault.drill.state == "running"

    def test_two_workers_request_once(self, xid: Fault) -> None:
        drill = xid.drill
        drill.state = Drill.DrillState.WAITING  # as another worker has read it
        begin(xid.game_day, drill)
        assert xid.request == {"id": drill.pk, "fault": "xid", "seconds": 60}
        assert AuditEntry.objects.filter(action="gameday.fault").count() == 1

    def test_two_workers_request_one_node(self, lab: Lab, xid: Fault) -> None:
        other = lab.machine("dgx-02")
        other.post(other.facts(time.time(), game_day=True))
        drill = xid.drill
        drill.state = Drill.DrillState.WAITING  # as another worker has read it
        begin(xid.game_day, drill)
        assert "plant" not in other.post().json()
        assert xid.request is not None
