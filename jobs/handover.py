"""Hand an attempt that is due to the scheduler, once.

    1. claim the row: `submitting_at` by a conditional update; of two workers one goes on
    2. a claim that somebody made before and never finished: look for the attempt's key first
    3. write the run directory, ask the scheduler, write down its id
An unknown outcome leaves the claim: after RETRY, longer than any request may take, the next tick begins at 2.
"""

from __future__ import annotations

import logging
from datetime import timedelta

from django.db.models import Q
from django.utils import timezone

from jobs import live, tokens
from jobs.ending import end
from jobs.errors import JobError
from jobs.models import Attempt
from jobs.restart import Ended
from jobs.script import prepare, submission
from nodes import inventory
from nodes.schedulers.base import Scheduler, SchedulerError, Submission

logger = logging.getLogger(__name__)

RETRY = timedelta(seconds=30)


def due() -> list[int]:
    """Attempts that no scheduler has yet: new ones, and those whose submission did not come to an end."""
    return list(
        Attempt.objects.filter(ended_at=None, scheduler_id="")
        .filter(Q(submitting_at=None) | Q(submitting_at__lt=timezone.now() - RETRY))
        .order_by("id")
        .values_list("id", flat=True)[:20]
    )


def hand_over(attempt_id: int, scheduler: Scheduler | None = None) -> None:
    """Submit one attempt if it is due; twice at once or after a crash is no harm."""
    attempt = Attempt.objects.select_related("job__project", "job__owner", "resume_from").filter(pk=attempt_id).first()
    if attempt is None or attempt.scheduler_id or attempt.ended_at is not None:
        return
    if attempt.cancel_asked_at is not None and attempt.submitting_at is None:
        end(attempt, Ended("cancelled", cancelled=True), reason="Cancelled before it was submitted.")
        return
    if not _claim(attempt):
        return
    try:
        source = scheduler or inventory.scheduler()
        scheduler_id = source.find(attempt.key) if attempt.submitting_at is not None else None
        if scheduler_id is None:
            if attempt.cancel_asked_at is not None:
                end(attempt, Ended("cancelled", cancelled=True), reason="Cancelled before it was submitted.")
                return
            if not _may_start(attempt, source):
                return
            asked = submission(attempt, prepare(attempt))
            _check_grace(asked)
            scheduler_id = source.submit(asked)
    except SchedulerError as error:
        _not_taken(attempt, error)
        return
    except (OSError, JobError) as error:
        _not_taken(attempt, SchedulerError(f"The run directory cannot be written: {error}", permanent=True))
        return
    _taken(attempt, scheduler_id)


def _check_grace(asked: Submission) -> None:
    """That there is time to stop in good order: known only once checkpoints of this job were measured."""
    if asked.grace_s >= asked.time_limit_s:
        needs = f"Stopping with a last checkpoint takes {asked.grace_s} s by the last one's measure"
        message = f"{needs}, the time limit is {asked.time_limit_s} s. Submit it with a longer resources.time_limit."
        raise SchedulerError(message, permanent=True)


def _claim(attempt: Attempt) -> bool:
    """Ours to submit, unless somebody else is just doing it. `attempt` keeps the earlier claim's time."""
    stale = Q(submitting_at=None) | Q(submitting_at__lt=timezone.now() - RETRY)
    rows = Attempt.objects.filter(stale, pk=attempt.pk, scheduler_id="", ended_at=None)
    return rows.update(submitting_at=timezone.now()) == 1


def _may_start(attempt: Attempt, source: Scheduler) -> bool:
    """Not while the scheduler still has an earlier attempt of this job alive or requeued (PROTOCOLS §1)."""
    before = Attempt.objects.filter(job_id=attempt.job_id, number__lt=attempt.number).exclude(scheduler_id="")
    ids = sorted(set(before.values_list("scheduler_id", flat=True)))
    if any(status.state in Attempt.ALIVE for status in source.status(ids).values()):
        Attempt.objects.filter(pk=attempt.pk).update(
            submitting_at=None, reason="Waits until the attempt before it has ended."
        )
        return False
    return True


def _taken(attempt: Attempt, scheduler_id: str) -> None:
    now = timezone.now()
    rows = Attempt.objects.filter(pk=attempt.pk, scheduler_id="")
    if rows.update(scheduler_id=scheduler_id, submitted_at=now, reason="") != 1:
        return
    attempt.scheduler_id = scheduler_id
    logger.info("attempt %s: submitted as %s", attempt.pk, scheduler_id)
    tokens.leave(attempt)
    live.announce(attempt.pk)


def _not_taken(attempt: Attempt, error: SchedulerError) -> None:
    """Refused: the attempt has failed. Not reached: it stays due, and the page says why."""
    if error.permanent:
        end(attempt, Ended("failed"), cause="rejected", reason=str(error))
        return
    logger.warning("attempt %s: not submitted, tried again: %s", attempt.pk, error)
    Attempt.objects.filter(pk=attempt.pk).update(reason=f"Not submitted yet: {error}")
    live.announce(attempt.pk)
