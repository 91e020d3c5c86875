"""Request another interval between checkpoints, from the job's next attempt on."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

from django.db import transaction

from jobs.errors import Conflict, Refused, SpecError
from jobs.models import Attempt, CadenceOrder, Job
from portal.access import can, note_if_sysadmin
from portal.audit import Change
from portal.models import User

MAX_EVERY = 10**9


def set_cadence(user: User, job: Job, every: int | None) -> None:
    """Save every `every` steps from the next attempt on; None: as in the specification.

    Raises Refused, Conflict if it is not a run of our trainer, or SpecError.
    """
    if not can(user, "change", job):
        raise Refused(f"#{job.pk} belongs to {job.owner}.", f"Ask them or a lead of {job.project}.")
    if not job.job_kind.trains:
        raise Conflict(f"Not changed. #{job.pk} runs your own program, which decides itself when to save.")
    if every is not None and not 1 <= every <= MAX_EVERY:
        raise SpecError.at("every", f"{every:,} {job.job_kind.units} is out of range: use 1 to {MAX_EVERY:,}.")
    with transaction.atomic():
        before = CadenceOrder.objects.filter(job=job).values_list("every", flat=True).first()
        if every is None:
            CadenceOrder.objects.filter(job=job).delete()
        else:
            CadenceOrder.objects.update_or_create(job=job, defaults={"every": every, "asked_by": user})
        text = "" if every is None else f"every {every} {job.job_kind.units}"
        note_if_sysadmin(user, "job.cadence", job, text, Change(before={"every": before}, after={"every": every}))


def first_attempt_affected(attempts: Sequence[Attempt], asked_at: datetime | None = None) -> int:
    """Return the number of the first attempt with the interval requested at that time, or now.

    `attempts`: all of the job's.

    What an attempt runs is written when it is submitted, and a requeued attempt starts with the same.
    """
    moment = asked_at or datetime.max.replace(tzinfo=UTC)
    for attempt in attempts:
        is_later = attempt.submitting_at > moment if attempt.submitting_at else attempt.state == Attempt.State.PENDING
        if is_later and attempt.origin != Attempt.Origin.REQUEUED:
            return attempt.number
    return attempts[-1].number + 1
