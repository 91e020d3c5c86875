"""Test goodput: steps that count over the time of allocations, through restarts of both kinds."""

from datetime import timedelta

import pytest
from django.utils import timezone

from jobs.goodput import goodput
from jobs.intake import reports
from jobs.models import Attempt, Job
from portal.series import compact, read
from tests.jobs.reporting import Spooled, attempt_of, job_of, post
from tests.lab import a_checkpoint
from tests.portal.series import everybody, small

pytestmark = pytest.mark.django_db
NOW = timezone.now()


def trained(attempt: Attempt, first: int, last: int, *, incarnation: int = 0, seconds: float = 2.0) -> None:
    """Report the steps from first + 1 to last, each `seconds` long."""
    stream = Spooled(incarnation=incarnation).add_event("run.started", start_step=first)
    for step in range(first + 1, last + 1):
        stream.log(step, step_seconds=seconds)
    reports.ingest(attempt.pk, post(stream))


def an_attempt(job: Job, number: int, minutes: float, **fields: object) -> Attempt:
    """Return an attempt that ran for this long, until now."""
    return attempt_of(job, number=number, started_at=NOW - timedelta(minutes=minutes), **fields)


def goodput_of(job: Job) -> tuple[float, float] | None:
    found = goodput(list(job.attempts.select_related("resume_from").order_by("number")), NOW)
    return (round(found.useful_seconds, 3), round(found.wall_seconds, 3)) if found else None


def test_steps_over_the_time_since_the_start() -> None:
    job = job_of()
    attempt = an_attempt(job, 1, minutes=10)
    assert goodput_of(job) is None  # nothing reported
    trained(attempt, 0, 100)
    assert goodput_of(job) == (200.0, 600.0)
    found = goodput([attempt], NOW)
    assert found is not None
    assert found.fraction == pytest.approx(1 / 3)


def test_steps_done_again_count_once() -> None:
    """A restart in place from step 40: steps 41 to 60 were wasted, however long they take the second time."""
    job = job_of()
    attempt = an_attempt(job, 1, minutes=10)
    trained(attempt, 0, 60)
    trained(attempt, 40, 100, incarnation=1, seconds=3.0)
    assert goodput_of(job) == (40 * 2.0 + 60 * 3.0, 600.0)


def test_the_launcher_of_a_custom_program_reports_where_it_went_on() -> None:
    job = job_of()
    job.kind = "script"
    job.save(update_fields=["kind"])
    attempt = an_attempt(job, 1, minutes=10)
    launcher = Spooled(rank=-1)
    for incarnation, (first, last) in enumerate([(0, 60), (40, 50)]):
        launcher.add_event(
            "incarnation.started", incarnation=incarnation, resumed_from=f"step-{first}" if first else ""
        )
        stream = Spooled(incarnation=incarnation)
        for step in range(first + 1, last + 1):
            stream.log(step, step_seconds=2.0)
        reports.ingest(attempt.pk, post(stream))
    reports.ingest(attempt.pk, post(launcher))
    assert goodput_of(job) == (100.0, 600.0), "41 to 60 were done in vain, whether it has done them again or not"


def test_steps_behind_a_restart_are_lost_before_they_are_done_again() -> None:
    job = job_of()
    first = an_attempt(job, 1, minutes=20, state="node_fail", ended_at=NOW - timedelta(minutes=10))
    trained(first, 0, 60)
    second = an_attempt(job, 2, minutes=5)
    trained(second, 40, 45)
    assert goodput_of(job) == (45 * 2.0, 900.0)  # the queue between them is not counted


def test_of_a_job_that_ended_badly_what_no_checkpoint_has_is_lost() -> None:
    job = job_of()
    attempt = an_attempt(job, 1, minutes=10, state="failed", ended_at=NOW)
    trained(attempt, 0, 60)
    assert goodput_of(job) == (0.0, 600.0)
    a_checkpoint(Job.objects.get(pk=job.pk), 50)
    assert goodput_of(job) == (100.0, 600.0)
    Attempt.objects.filter(pk=attempt.pk).update(state="completed")
    assert goodput_of(job) == (120.0, 600.0)


def test_nothing_is_claimed_of_what_has_not_run() -> None:
    job = job_of()
    attempt_of(job, state="pending")
    assert goodput_of(job) is None


def test_long_runs_are_added_in_stretches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Merged into chunks of four steps, the result is right to within one at each restart."""
    small(monkeypatch)
    job = job_of()
    first = an_attempt(job, 1, minutes=60, state="node_fail", ended_at=NOW - timedelta(minutes=30))
    trained(first, 0, 202)
    second = an_attempt(job, 2, minutes=30)
    trained(second, 150, 400, seconds=3.0)
    compact.compact(quiet=everybody)
    found, _ = read.stretches([("attempt", first.pk), ("attempt", second.pk)], "step_seconds", points=64)
    assert len(found.first) < 200
    useful, wall = goodput_of(job) or (0.0, 0.0)
    assert useful == pytest.approx(150 * 2.0 + 250 * 3.0, abs=4 * 3.0)
    assert wall == 3600.0
