"""A sweep that is submitted as one array avoids unhealthy nodes in all its jobs."""

from __future__ import annotations

import pytest
from django.utils import timezone

from nodes.models import HealthEntry
from portal.models import User
from tests.jobs.following.launchers import machines
from tests.jobs.schedulers import ScriptedScheduler
from tests.jobs.submitting.sweeping import firsts, make, tick

pytestmark = pytest.mark.django_db


def test_every_job_of_an_array_avoids_them(oskar: User, scheduler: ScriptedScheduler) -> None:
    machines(scheduler, "dgx01", "dgx02", "dgx03")
    now = timezone.now()
    times = {"first_seen": now, "last_seen": now, "opened_at": now}
    HealthEntry.objects.create(node="dgx02", rule="hot", title="Hot", state="open", action="exclude", **times)
    sweep = make(oskar)
    tick(scheduler)
    ((submission, _, _),) = scheduler.arrays
    assert submission.excluded_nodes == ("dgx02",)
    assert {tuple(attempt.excluded_nodes) for attempt in firsts(sweep)} == {("dgx02",)}
