"""Test thousands of attempts at once, and slow schedulers: no part of a tick delays the others."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from jobs.following import follow, poll
from jobs.following.cancellation import cancels
from jobs.models import Attempt, Job
from jobs.submitting.submit import submit
from nodes.models import Node, NodeOrder, Reading
from nodes.schedulers.base import JobStatus, SchedulerError
from portal.models import Project, User
from tests.jobs.following.launchers import newest
from tests.jobs.schedulers import ScriptedScheduler
from tests.jobs.submissions import spec_of
from tests.lab import a_job, sysadmin

pytestmark = pytest.mark.django_db

SILENT = SchedulerError("slurmrestd did not answer in time")


def many(
    count: int, owner: User, project: Project, scheduler: ScriptedScheduler, *, state: str = "running", **fields: Any
) -> Job:
    """Create so many attempts that the scheduler has; all of one job, as only rows of attempts count."""
    job = a_job(owner, project, state=state, attempt={"scheduler_id": "1000", "token_digest": "x", **fields})
    first = job.latest
    assert first is not None
    given = {"state": state, "started_at": first.started_at, "token_digest": "x", "directory": "attempt-1", **fields}
    more = [Attempt(job=job, number=n + 1, scheduler_id=str(1000 + n), **given) for n in range(1, count)]
    Attempt.objects.bulk_create(more, batch_size=500)
    Attempt.objects.filter(pk=first.pk).update(**given)
    started = first.started_at.timestamp() if first.started_at else None
    for key, scheduler_id in Attempt.objects.values_list("key", "scheduler_id"):
        scheduler.jobs[scheduler_id] = JobStatus(scheduler_id=scheduler_id, state=state, key=key, started_at=started)
    return job


class Clock:
    """A clock that only a test advances; replaces a module's `time`."""

    def __init__(self) -> None:
        self.now = time.monotonic()

    def monotonic(self) -> float:
        return self.now


@pytest.mark.lengthy
def test_what_does_not_change_costs_no_query(
    oskar: User, project: Project, scheduler: ScriptedScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two ticks over 1,500 attempts cost what they cost over 20, and 20 changes what they cost among 20."""
    for module in (follow, poll):  # a part of a tick that is short of time leaves the rest to the next
        monkeypatch.setattr(module, "time", Clock())
    costs = []
    for count in (20, 1_500):
        Attempt.objects.all().delete()
        scheduler.jobs.clear()
        many(count, oskar, project, scheduler)
        follow.tick(scheduler)
        with CaptureQueriesContext(connection) as still:
            follow.tick(scheduler)
        for n in range(20):
            scheduler.update_job(str(1000 + n), nodes=("dgx-01",))
        with CaptureQueriesContext(connection) as changed:
            follow.tick(scheduler)
        assert Attempt.objects.filter(nodes=["dgx-01"]).count() == 20
        costs.append((len(still), len(changed)))
    for few, thousands in zip(*costs, strict=True):
        assert thousands - few <= 25, (
            "but for what goes by the clock: a lease that is renewed, windows of maintenance, spares"
        )


def test_a_change_of_anything_is_noticed(oskar: User, project: Project, scheduler: ScriptedScheduler) -> None:
    many(5, oskar, project, scheduler)
    scheduler.update_job("1000", state="suspended")
    scheduler.update_job("1001", reason="Suspended by root")
    scheduler.update_job("1002", nodes=("dgx-02", "dgx-01"))
    scheduler.update_job("1003", started_at=1_700_000_000.0)
    scheduler.update_job("1004", restart_count=1)
    follow.tick(scheduler)
    rows = {row.scheduler_id: row for row in Attempt.objects.alive()}
    assert (rows["1000"].state, rows["1001"].reason) == ("suspended", "Suspended by root")
    assert rows["1002"].nodes == ["dgx-02", "dgx-01"]
    assert rows["1003"].started_at is not None
    assert rows["1003"].started_at.timestamp() == 1_700_000_000.0
    assert rows["1004"].scheduler_restart_count == 1


def test_more_changes_than_a_tick_has_time_for(
    oskar: User, project: Project, scheduler: ScriptedScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next tick goes on with the rest."""
    many(9, oskar, project, scheduler)
    for n in range(9):
        scheduler.update_job(str(1000 + n), state="completing")
    clock = Clock()
    monkeypatch.setattr(poll, "time", clock)
    monkeypatch.setattr(poll, "APPLY_S", 3.0)
    apply = poll.Poll.apply

    def slow(self: poll.Poll, attempt: Attempt, status: JobStatus | None) -> None:
        clock.now += 1.0
        apply(self, attempt, status)

    monkeypatch.setattr(poll.Poll, "apply", slow)
    for done in (4, 8, 9):
        follow.tick(scheduler)
        assert Attempt.objects.filter(state="completing").count() == done


def test_a_hundred_cancels_that_time_out_hold_up_nobody(
    oskar: User, project: Project, scheduler: ScriptedScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cancel takes ten seconds; still another job is submitted in the same tick, and one that can be cancelled is."""
    many(100, oskar, project, scheduler, cancel_asked_at=timezone.now())
    clock = Clock()
    monkeypatch.setattr(cancels, "time", clock)

    def times_out(what: str, scheduler_id: str) -> SchedulerError | None:
        if scheduler_id == "1042":
            return None
        clock.now += 10.0
        return SILENT

    scheduler.refuses = times_out
    submit(oskar, spec_of(name="other"), spec_toml="")
    began = clock.now
    follow.tick(scheduler)
    assert clock.now - began <= 10.0
    assert len(scheduler.submissions) == 1
    for _ in range(2_000):
        if scheduler.signals:
            break
        cancels.advance(_round(scheduler))
    assert scheduler.signals == [("1042", "USR1")]


def _round(scheduler: ScriptedScheduler) -> follow.Tick:
    claim = follow.lease.take("follow")
    assert claim is not None
    claim.release()
    return follow.Tick(claim, scheduler)


def test_ten_minutes_away(
    oskar: User, job: Job, scheduler: ScriptedScheduler, tick: Callable[[], bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tick makes one call, nothing fails, requests wait, and the pages show since when the scheduler is silent."""
    scheduler.update_job("101", state="running")
    tick()
    other, _ = submit(oskar, spec_of(name="other"), spec_toml="")
    Attempt.objects.filter(pk=newest().pk).update(cancel_asked_at=timezone.now())
    node = Node.objects.get()
    order = NodeOrder.objects.create(node=node.name, action="drain", reason="fan", asked_by=sysadmin("ops"))
    Reading.objects.update(asked_at=timezone.now() - timedelta(minutes=1))
    scheduler.broken, scheduler.calls = SILENT, 0
    before = list(Attempt.objects.order_by("id").values("state", "reason", "ended_at", "unknown_since", "version"))
    for _ in range(5):
        assert tick()
    assert scheduler.calls == 5
    assert list(Attempt.objects.order_by("id").values(*before[0])) == before
    reading = Reading.objects.get(part="nodes")
    assert reading.error == str(SILENT)
    assert reading.failing_since is not None
    order.refresh_from_db()
    assert (order.state, order.outcome) == ("asked", f"Not sent: {SILENT}")
    scheduler.broken = None
    NodeOrder.objects.update(tried_at=None)
    tick()
    assert scheduler.signals == [("101", "USR1")]
    assert other.attempts.get().scheduler_id == "102"
    assert scheduler.drained
