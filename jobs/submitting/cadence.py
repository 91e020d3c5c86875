"""Asking for another interval between saves, from the next attempt on that is handed over."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

from django.db import transaction

from jobs.errors import Conflict, Refused, SpecError
from jobs.models import Attempt, CadenceOrder, Job
from portal.access import can, note_if_sysadmin
from portal.audit import Change
from portal.models import User

MOST = 10**9


def order(user: User, job: Job, every: int | None) -> None:
    """Save every so many steps from the next attempt on that is handed over; None: as its specification says.

    Raises Refused, Conflict where it is no run of our trainer, or SpecError.
    """
    if not can(user, "change", job):
        raise Refused(f"#{job.pk} belongs to {job.owner}.", f"Ask them or a lead of {job.project}.")
    if not job.of_kind.trains:
        raise Conflict(f"Not changed. #{job.pk} runs a program of its own, which saves when it likes.")
    if every is not None and not 1 <= every <= MOST:
        raise SpecError.at("every", f"{every:,} {job.of_kind.many} can’t be: take 1 to {MOST:,}.")
    with transaction.atomic():
        before = CadenceOrder.objects.filter(job=job).values_list("every", flat=True).first()
        if every is None:
            CadenceOrder.objects.filter(job=job).delete()
        else:
            CadenceOrder.objects.update_or_create(job=job, defaults={"every": every, "asked_by": user})
        said = "" if every is None else f"every {every} {job.of_kind.many}"
        note_if_sysadmin(user, "job.cadence", job, said, Change(before={"every": before}, after={"every": every}))


def first_to_obey(attempts: Sequence[Attempt], asked_at: datetime | None = None) -> int:
    """The number of the first attempt that does as was asked then, or would if it were asked now; `attempts`: all.

    What it runs is written as it is handed over, and what the scheduler requeues starts with the same.
    """
    asked = asked_at or datetime.max.replace(tzinfo=UTC)
    for one in attempts:
        is_later = one.submitting_at > asked if one.submitting_at else one.state == Attempt.State.PENDING
        if is_later and one.origin != Attempt.Origin.REQUEUED:
            return one.number
    return attempts[-1].number + 1
