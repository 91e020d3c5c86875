"""Test that faults of a game day are cleared although no drill follows them any more."""

from __future__ import annotations

import time
from datetime import timedelta

import pytest
from django.utils import timezone

from jobs.gameday.leftovers import MIN_EVIDENCE_AGE
from jobs.gameday.node_drills import LATE_REPORT
from jobs.models import Drill, GameDay
from nodes.models import HealthEntry
from nodes.telemetry import planting
from tests.jobs.gameday.faults import NODE, Fault

pytestmark = pytest.mark.django_db


class TestAfterTheDrill:
    """What a drill no longer follows is cleared, and the node returns."""

    @pytest.fixture
    def late(self, xid: Fault) -> Fault:
        """Return a fault that its agent planted and that its health rule has not noticed by the end of the drill."""
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
        HealthEntry.objects.update(last_seen=timezone.now() - MIN_EVIDENCE_AGE)
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
        HealthEntry.objects.update(last_seen=timezone.now() - MIN_EVIDENCE_AGE)
        late.advance(2)
        assert late.lab.entry().state == "open"
        assert NODE in late.lab.scheduler.drained
