"""Test cancelling sweeps: as a whole or job by job, before and after they have scheduler ids."""

from __future__ import annotations

import time
from typing import Any

import pytest
from django.utils import timezone

from jobs.disk.prepare import submission
from jobs.errors import Conflict, Refused
from jobs.following.submission import arrays, handover
from jobs.models import Attempt, Stray, Sweep
from jobs.submitting import sweeps
from jobs.submitting.submit import cancel
from portal.models import Project, User
from tests.jobs.schedulers import ScriptedScheduler
from tests.jobs.submitting.sweeping import firsts, later, make, tick
from tests.lab import a_project, person

pytestmark = pytest.mark.django_db


def test_a_job_that_was_cancelled_before_is_left_out(oskar: User, scheduler: ScriptedScheduler) -> None:
    sweep = make(oskar)
    cancel(oskar, sweep.jobs.get(sweep_index=1))
    tick(scheduler)
    ((_, tasks, _),) = scheduler.arrays
    assert tasks == [0, 2, 3, 4, 5]
    assert [attempt.state for attempt in firsts(sweep)][:3] == ["pending", "cancelled", "pending"]


def test_a_job_that_was_cancelled_while_nobody_knew_is_hunted_down(oskar: User, scheduler: ScriptedScheduler) -> None:
    sweep = make(oskar)
    scheduler.loses_answers = True
    tick(scheduler)
    lost, scheduler.jobs, scheduler.loses_answers = scheduler.jobs, {}, False
    cancel(oskar, sweep.jobs.get(sweep_index=1))
    later()
    tick(scheduler)  # the request did not arrive: 1 has ended, the others are requested again
    assert [tasks for _, tasks, _ in scheduler.arrays] == [[0, 1, 2, 3, 4, 5], [0, 2, 3, 4, 5]]
    stray = Stray.objects.get()
    assert (stray.key, stray.task, stray.scheduler_id) == (sweep.key, 1, "")
    scheduler.jobs |= lost  # now it arrives
    later()
    tick(scheduler)
    assert scheduler.cancelled == ["501_1"]
    scheduler.update_job("501_1", state="cancelled")
    later()
    tick(scheduler)
    tick(scheduler)
    assert not Stray.objects.exclude(scheduler_id="").exists()


def test_an_id_that_comes_for_an_ended_job_is_cancelled(oskar: User, scheduler: ScriptedScheduler) -> None:
    sweep = make(oskar)
    rows = firsts(sweep)
    Attempt.objects.filter(pk=rows[2].pk).update(ended_at=timezone.now(), state="cancelled")
    rows[2].job.refresh_from_db()
    ids = scheduler.submit_array(_submission_of(sweep), [0, 1, 2], at_once=None)
    for row in rows:
        handover.prepare(row)
    arrays._record_submissions(sweep, rows[:3], ids, scheduler, time.monotonic() + 5)
    assert scheduler.cancelled == ["501_2"]
    assert (Stray.objects.get().key, Stray.objects.get().task) == (sweep.key, 2)


def test_cancelling_a_sweep_requests_the_end_of_all_that_live(oskar: User, scheduler: ScriptedScheduler) -> None:
    sweep = make(oskar)
    tick(scheduler)
    scheduler.update_job("501_0", state="completed", ended_at=time.time(), nodes=("dgx-01",), exit_code=0)
    tick(scheduler)
    Attempt.objects.filter(scheduler_id="501_0").update(decided_at=timezone.now())
    assert sweeps.cancel(oskar, sweep) == 5
    tick(scheduler)
    assert sorted(scheduler.cancelled) == [f"501_{n}" for n in range(1, 6)]
    for n in range(1, 6):
        scheduler.update_job(f"501_{n}", state="cancelled")
    tick(scheduler)
    assert sweep.counts() == {"completed": 1, "cancelled": 5}
    Attempt.objects.update(decided_at=timezone.now())
    with pytest.raises(Conflict):
        sweeps.cancel(oskar, sweep)


def test_others_may_not_cancel_it(oskar: User, project: Project) -> None:
    sweep = make(oskar)
    with pytest.raises(Refused):
        sweeps.cancel(person("eve", project), sweep)
    assert Sweep.objects.visible_to(person("mallory", a_project("other"))).count() == 0


def _submission_of(sweep: Sweep) -> Any:
    first = firsts(sweep)[0]
    return submission(first, handover.prepare(first))
