"""Hold jobs that wait for others to complete: Vigil holds them, not the scheduler (docs/decisions explain why).

A predecessor counts once it has completed, however many attempts that took. If it ended for good without completing,
or was deleted, the jobs that wait for it end.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from django.db.models import Q, QuerySet

from jobs import live
from jobs.errors import Problem
from jobs.following.end_causes.cause import AttemptEnd
from jobs.following.ending import end
from jobs.models import Attempt, Job, Predecessor
from portal import bulk
from portal.models import User

BATCH = 5_000  # ids per query
MAX_PER_TICK = 200  # jobs ended per tick
_CANNOT_COMPLETE = Q(before=None) | (
    ~Q(before__latest__state=Attempt.State.COMPLETED) & Q(before__latest__decided_at__isnull=False)
)


def problems(user: User, numbers: Iterable[int]) -> list[Problem]:
    """Return what stops a job from waiting for these."""
    reasons = []
    there = {job.pk: job for job in Job.objects.visible_to(user).select_related("latest").filter(pk__in=[*numbers])}
    for number in numbers:
        latest = there[number].latest if number in there else None
        if latest is None:
            reasons.append(Problem("after", f"#{number} does not exist or you may not see it. Remove it."))
        elif latest.decided_at is not None and latest.state != Attempt.State.COMPLETED:
            fix = f"Resume #{number} first, or remove it"
            reasons.append(
                Problem("after", f"#{number} ended as {_word(latest)}, so this job would never start. {fix}.")
            )
    return reasons


def wait(job: Job, numbers: Iterable[int]) -> str:
    """Hold a new job until these have completed. Return why its attempt waits."""
    rows = [Predecessor(job=job, before_id=number, number=number) for number in numbers]
    Predecessor.objects.bulk_create(rows)
    return reason_to_wait([row.number for row in rows])


def wait_together(jobs: Iterable[Job], numbers: Sequence[int]) -> None:
    """Hold new jobs, whose attempts already carry `reason_to_wait`, until the same ones have completed."""
    rows = ((job.pk, number, number, False) for job in jobs for number in numbers)
    bulk.insert_rows(Predecessor, ("job", "before", "number", "met"), rows)


def is_waiting(job_id: int) -> bool:
    return Predecessor.objects.filter(job=job_id, met=False).exists()


def advance() -> None:
    """Mark predecessors that have completed, end jobs whose predecessors cannot, and update why the others wait."""
    # Open attempts are read first and passed by id: with one combined query SQLite would scan every attempt that has
    # ever completed, or every job whose predecessors have ever failed.
    unmet = Predecessor.objects.filter(met=False)
    opened = list(Attempt.objects.open().only("job", "state", "ended_at", "scheduler_id", "cancel_asked_at"))
    for batch in bulk.chunks([attempt.job_id for attempt in opened if attempt.state == Attempt.State.COMPLETED], BATCH):
        unmet.filter(before__in=batch).update(met=True)  # also for what was cancelled and may be resumed
    waiting = [
        attempt for attempt in opened if not (attempt.ended_at or attempt.scheduler_id or attempt.cancel_asked_at)
    ]
    for batch in bulk.chunks([attempt.job_id for attempt in waiting], BATCH):
        _advance(unmet.filter(job__in=batch))


def _advance(unmet: QuerySet[Predecessor]) -> None:
    """Do what `advance` does for one batch of waiting jobs."""
    before = list(unmet.exclude(before=None).values_list("before", flat=True).distinct())
    if not before and not unmet.exists():
        return
    for batch in bulk.chunks(before, BATCH):
        states = Job.objects.filter(pk__in=batch).values_list("pk", "latest__state")
        completed = [pk for pk, state in states if state == Attempt.State.COMPLETED]
        if completed:
            unmet.filter(before__in=completed).update(met=True)
    unmeetable = unmet.filter(_CANNOT_COMPLETE).select_related("job__latest", "before__latest")
    for row in unmeetable.order_by("job", "number")[:MAX_PER_TICK]:
        _end(row)
    waiting: dict[int, list[int]] = {}
    for attempt_id, number in unmet.values_list("job__latest", "number").order_by("number"):
        waiting.setdefault(attempt_id, []).append(number)
    for attempt_id, numbers in waiting.items():
        reason = reason_to_wait(numbers)
        if Attempt.objects.filter(pk=attempt_id, ended_at=None).exclude(reason=reason).update(reason=reason):
            live.announce(attempt_id)


def _end(row: Predecessor) -> None:
    """Cancel a job whose predecessor cannot complete, with a reason that names the predecessor.

    A second row of the same job changes nothing.
    """
    attempt = row.job.latest
    if attempt is None:
        return
    latest = row.before.latest if row.before is not None else None
    how = f"ended as {_word(latest)}" if latest is not None else "was deleted before it completed"
    reason = f"#{row.number} {how}, so this job was not started."
    end(attempt, AttemptEnd("cancelled"), cause="unmet", reason=reason, only=Q(scheduler_id="", cancel_asked_at=None))


def reason_to_wait(numbers: Sequence[int]) -> str:
    if not numbers:
        return ""
    names = [f"#{number}" for number in numbers[:5]]
    more = [f"{len(numbers) - 5} more"] if len(numbers) > 5 else []
    *first, last = [*names, *more]
    return f"Waits for {', '.join(first)} and {last} to complete." if first else f"Waits for {last} to complete."


def _word(attempt: Attempt) -> str:
    return attempt.state.replace("_", " ")
