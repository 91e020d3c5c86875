"""Asking for another interval between saves, from a job's next attempt on."""

from __future__ import annotations

from django.db import transaction

from jobs.errors import Conflict, Refused, SpecError
from jobs.models import CadenceOrder, Job
from portal.access import can, note_if_sysadmin
from portal.models import User

MOST = 10**9


def order(user: User, job: Job, every: int | None) -> None:
    """Save every so many steps from the next attempt on; None: as its specification says.

    Raises Refused, Conflict where it is no run of our trainer, or SpecError.
    """
    if not can(user, "change", job):
        raise Refused(f"#{job.pk} belongs to {job.owner}.", f"Ask them or a lead of {job.project}.")
    if job.kind != "distributed":
        raise Conflict(f"Not changed. #{job.pk} runs a program of its own, which saves when it likes.")
    if every is not None and not 1 <= every <= MOST:
        raise SpecError.at("every", f"{every:,} steps can’t be: take 1 to {MOST:,}.")
    with transaction.atomic():
        if every is None:
            CadenceOrder.objects.filter(job=job).delete()
        else:
            CadenceOrder.objects.update_or_create(job=job, defaults={"every": every, "asked_by": user})
        note_if_sysadmin(user, "job.cadence", job, "" if every is None else f"every {every} steps")
