"""Test jobs that wait for others to complete, whatever happens to these."""

from __future__ import annotations

from typing import Any

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from jobs.errors import SpecError
from jobs.following.submission import dependencies, handover
from jobs.models import Attempt, Job
from jobs.submitting.submit import cancel, delete, resume
from portal.models import Project, User
from tests.jobs.schedulers import ScriptedScheduler
from tests.jobs.submissions import spec_of, submit_spec
from tests.lab import a_job, a_project, person

pytestmark = pytest.mark.django_db


@pytest.fixture
def first(oskar: User, project: Project) -> Job:
    return a_job(oskar, project, state="running", attempt={"scheduler_id": "77"})


def ended(job: Job, state: str) -> None:
    Attempt.objects.filter(job=job).update(state=state, ended_at=timezone.now(), decided_at=timezone.now())


def latest(job: Job) -> Attempt:
    return Attempt.objects.filter(job=job).latest("number")


def tick(scheduler: ScriptedScheduler) -> list[int]:
    """Let the follower process new attempts, and return the scheduler's ids of those it submitted."""
    dependencies.advance()
    due = handover.due()
    for attempt_id in due:
        handover.hand_over(attempt_id, scheduler)
    return due


def test_waits_until_the_other_has_completed(oskar: User, first: Job, scheduler: ScriptedScheduler) -> None:
    job, _ = submit_spec(oskar, spec_of(after=[first.pk]))
    handover.hand_over(latest(job).pk, scheduler)  # as the task does at once
    assert tick(scheduler) == []
    assert (latest(job).state, latest(job).reason) == ("pending", f"Waits for #{first.pk} to complete.")
    ended(first, "completed")
    assert tick(scheduler) == [latest(job).pk]
    assert len(scheduler.submissions) == 1


def test_a_restart_of_the_other_does_not_end_the_wait(oskar: User, first: Job, scheduler: ScriptedScheduler) -> None:
    job, _ = submit_spec(oskar, spec_of(after=[first.pk]))
    Attempt.objects.filter(job=first).update(state="node_fail", ended_at=timezone.now())  # not decided yet
    assert tick(scheduler) == []
    ended(first, "node_fail")
    again = Attempt.objects.create(job=first, number=2, state="running", scheduler_id="78")
    Job.objects.filter(pk=first.pk).update(latest=again)
    assert tick(scheduler) == []
    assert latest(job).ended_at is None
    ended(first, "completed")
    assert tick(scheduler) == [latest(job).pk]


def test_all_of_them_must_have_completed(
    oskar: User, project: Project, first: Job, scheduler: ScriptedScheduler
) -> None:
    second = a_job(oskar, project, state="pending", attempt={"scheduler_id": "7"})
    job, _ = submit_spec(oskar, spec_of(after=[first.pk, second.pk]))
    assert latest(job).reason == f"Waits for #{first.pk} and #{second.pk} to complete."
    ended(first, "completed")
    assert tick(scheduler) == []
    assert latest(job).reason == f"Waits for #{second.pk} to complete."


@pytest.mark.parametrize("state", ["failed", "cancelled", "timeout", "out_of_memory"])
def test_in_vain_is_cancelled_and_names_the_other(
    oskar: User, first: Job, scheduler: ScriptedScheduler, state: str
) -> None:
    job, _ = submit_spec(oskar, spec_of(after=[first.pk]))
    then, _ = submit_spec(oskar, spec_of(after=[job.pk]))
    ended(first, state)
    tick(scheduler)
    attempt = latest(job)
    word = state.replace("_", " ")
    assert (attempt.state, attempt.cause) == ("cancelled", "unmet")
    assert attempt.reason == f"#{first.pk} ended as {word}, so this job was not started."
    assert latest(then).ended_at is None
    ended(job, "cancelled")  # as the follower settles it
    tick(scheduler)
    assert latest(then).reason == f"#{job.pk} ended as cancelled, so this job was not started."
    assert not scheduler.submissions


def test_what_has_waited_in_vain_is_not_read_again(
    oskar: User,
    first: Job,
    scheduler: ScriptedScheduler,
    monkeypatch: pytest.MonkeyPatch,
    django_assert_max_num_queries: Any,
) -> None:
    monkeypatch.setattr(dependencies, "MAX_PER_TICK", 1)
    with django_assert_max_num_queries(20) as nothing_yet:
        dependencies.advance()
    for _ in range(4):
        submit_spec(oskar, spec_of(after=[a_job(oskar, first.project, state="running").pk]))
    Attempt.objects.exclude(job=first).filter(job__predecessors=None).update(state="failed", decided_at=timezone.now())
    for _ in range(4):
        tick(scheduler)
    assert set(Attempt.objects.exclude(cause="").values_list("cause", flat=True)) == {"unmet"}
    with django_assert_max_num_queries(len(nothing_yet)):
        dependencies.advance()


@pytest.mark.skipif(connection.vendor != "sqlite", reason="PostgreSQL goes by how many rows there are")
def test_nothing_is_searched_for_among_all_that_have_ever_completed(oskar: User, first: Job) -> None:
    submit_spec(oskar, spec_of(after=[first.pk]))
    ended(first, "completed")
    with CaptureQueriesContext(connection) as queries:
        dependencies.advance()
    with connection.cursor() as cursor:
        for query in queries.captured_queries:
            cursor.execute("EXPLAIN QUERY PLAN " + query["sql"])
            plan = " ".join(step[3] for step in cursor.fetchall())
            assert "(state=?)" not in plan, query["sql"]
            assert "SCAN jobs_attempt" not in plan, query["sql"]


def test_what_completes_meanwhile_counts_for_what_is_resumed(
    oskar: User, first: Job, scheduler: ScriptedScheduler
) -> None:
    """However it ends later: it has completed once."""
    job, _ = submit_spec(oskar, spec_of(after=[first.pk]))
    cancel(oskar, job)
    tick(scheduler)
    ended(first, "completed")
    tick(scheduler)
    ended(first, "failed")
    Attempt.objects.filter(job=job).update(decided_at=timezone.now())
    attempt = resume(oskar, job)
    assert tick(scheduler) == [attempt.pk]


def test_a_deleted_job_did_not_complete(oskar: User, first: Job, scheduler: ScriptedScheduler) -> None:
    job, _ = submit_spec(oskar, spec_of(after=[first.pk]))
    number = first.pk
    Attempt.objects.filter(job=first).update(ended_at=timezone.now(), decided_at=timezone.now(), state="failed")
    delete(oskar, first)
    tick(scheduler)
    assert latest(job).reason == f"#{number} was deleted before it completed, so this job was not started."


def test_waiting_can_be_cancelled(oskar: User, first: Job, scheduler: ScriptedScheduler) -> None:
    job, _ = submit_spec(oskar, spec_of(after=[first.pk]))
    cancel(oskar, job)
    tick(scheduler)
    assert (latest(job).state, latest(job).cause) == ("cancelled", "cancelled")


def test_resumed_it_waits_again_and_once_met_no_more(oskar: User, first: Job, scheduler: ScriptedScheduler) -> None:
    job, _ = submit_spec(oskar, spec_of(after=[first.pk]))
    cancel(oskar, job)
    tick(scheduler)
    ended(job, "cancelled")
    resume(oskar, job)
    assert tick(scheduler) == []
    assert latest(job).reason == f"Waits for #{first.pk} to complete."
    ended(first, "completed")
    assert tick(scheduler) == [latest(job).pk]
    Attempt.objects.filter(job=first).update(state="running", ended_at=None, decided_at=None)
    assert not dependencies.is_waiting(job.pk)


def test_only_visible_jobs_that_can_complete(oskar: User, first: Job, project: Project) -> None:
    hidden = a_job(person("zoe"), a_project("secret"), state="running")
    failed = a_job(oskar, project, state="failed")
    with pytest.raises(SpecError) as caught:
        submit_spec(oskar, spec_of(after=[first.pk, hidden.pk, 999_999, failed.pk]))
    assert [problem.message for problem in caught.value.problems] == [
        f"#{hidden.pk} does not exist or you may not see it. Remove it.",
        "#999999 does not exist or you may not see it. Remove it.",
        f"#{failed.pk} ended as failed, so this job would never start. Resume #{failed.pk} first, or remove it.",
    ]


def test_many_that_wait_hold_up_nobody(oskar: User, first: Job, scheduler: ScriptedScheduler) -> None:
    for _ in range(25):
        submit_spec(oskar, spec_of(after=[first.pk]))
    job, _ = submit_spec(oskar)
    assert tick(scheduler) == [latest(job).pk]
