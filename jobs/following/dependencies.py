"""Jobs that wait for others to complete: held here, not by the scheduler (docs/decisions: why Vigil holds).

A predecessor counts once it has completed, however many attempts that took. One that has ended for good otherwise, or
was deleted, ends what waits for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from django.db.models import Q, QuerySet

from jobs import live
from jobs.errors import Problem
from jobs.following.cause import Ended
from jobs.following.ending import end
from jobs.models import Attempt, Job, Predecessor
from portal import bulk
from portal.models import User

NUMBERS = 5_000  # in one question
AT_ONCE = 200  # of these, ended in one tick
_NEVER = Q(before=None) | (
    ~Q(before__latest__state=Attempt.State.COMPLETED) & Q(before__latest__decided_at__isnull=False)
)


def problems(user: User, numbers: Iterable[int]) -> list[Problem]:
    """What stops a job from waiting for these."""
    found = []
    there = {job.pk: job for job in Job.objects.visible_to(user).select_related("latest").filter(pk__in=[*numbers])}
    for number in numbers:
        latest = there[number].latest if number in there else None
        if latest is None:
            found.append(Problem("after", f"#{number} is no job that you can see. Take it out."))
        elif latest.decided_at is not None and latest.state != Attempt.State.COMPLETED:
            fix = "so this would never start. Resume it first, or take it out"
            found.append(Problem("after", f"#{number} has ended as {_word(latest)}, {fix}."))
    return found


def wait(job: Job, numbers: Iterable[int]) -> str:
    """Hold a new job until these have completed; why its attempt waits."""
    rows = [Predecessor(job=job, before_id=number, number=number) for number in numbers]
    Predecessor.objects.bulk_create(rows)
    return reason_to_wait([row.number for row in rows])


def wait_together(jobs: Iterable[Job], numbers: Sequence[int]) -> None:
    """Hold new jobs, whose attempts say so (`reason_to_wait`), until the same ones have completed."""
    rows = ((job.pk, number, number, False) for job in jobs for number in numbers)
    bulk.insert_rows(Predecessor, ("job", "before", "number", "met"), rows)


def is_waiting(job_id: int) -> bool:
    return Predecessor.objects.filter(job=job_id, met=False).exists()


def look() -> None:
    """See which have completed, end what waits in vain, and say what the others wait for."""
    # What is open is read whole, and its numbers asked for: told more at once, SQLite would look through all that have
    # ever completed, or all that have waited in vain.
    unmet = Predecessor.objects.filter(met=False)
    opened = list(Attempt.objects.open().only("job", "state", "ended_at", "scheduler_id", "cancel_asked_at"))
    for some in _by([one.job_id for one in opened if one.state == Attempt.State.COMPLETED]):
        unmet.filter(before__in=some).update(met=True)  # also for what was cancelled and may be resumed
    is_held = [one for one in opened if not (one.ended_at or one.scheduler_id or one.cancel_asked_at)]
    for some in _by([one.job_id for one in is_held]):
        _look_at(unmet.filter(job__in=some))


def _look_at(unmet: QuerySet[Predecessor]) -> None:
    """Of jobs that are held: what they need no longer wait for, which wait in vain, and why the others wait."""
    before = list(unmet.exclude(before=None).values_list("before", flat=True).distinct())
    if not before and not unmet.exists():
        return
    for some in _by(before):
        states = Job.objects.filter(pk__in=some).values_list("pk", "latest__state")
        completed = [pk for pk, state in states if state == Attempt.State.COMPLETED]
        if completed:
            unmet.filter(before__in=completed).update(met=True)
    vain = unmet.filter(_NEVER).select_related("job__latest", "before__latest")
    for row in vain.order_by("job", "number")[:AT_ONCE]:
        _end(row)
    waiting: dict[int, list[int]] = {}
    for attempt_id, number in unmet.values_list("job__latest", "number").order_by("number"):
        waiting.setdefault(attempt_id, []).append(number)
    for attempt_id, numbers in waiting.items():
        reason = reason_to_wait(numbers)
        if Attempt.objects.filter(pk=attempt_id, ended_at=None).exclude(reason=reason).update(reason=reason):
            live.announce(attempt_id)


def _by(numbers: list[int]) -> Iterator[list[int]]:
    for start in range(0, len(numbers), NUMBERS):
        yield numbers[start : start + NUMBERS]


def _end(row: Predecessor) -> None:
    """Cancels a job that waits in vain, with a reason that names the one it waited for.

    A second row of the same job changes nothing.
    """
    attempt = row.job.latest
    if attempt is None:
        return
    latest = row.before.latest if row.before is not None else None
    how = f"ended as {_word(latest)}" if latest is not None else "was deleted before it had completed"
    reason = f"#{row.number} {how}, so this one did not start."
    end(attempt, Ended("cancelled"), cause="unmet", reason=reason, only=Q(scheduler_id="", cancel_asked_at=None))


def reason_to_wait(numbers: Sequence[int]) -> str:
    if not numbers:
        return ""
    names = [f"#{number}" for number in numbers[:5]]
    more = [f"{len(numbers) - 5} more"] if len(numbers) > 5 else []
    *first, last = [*names, *more]
    return f"Waits for {', '.join(first)} and {last} to complete." if first else f"Waits for {last} to complete."


def _word(attempt: Attempt) -> str:
    return attempt.state.replace("_", " ")
