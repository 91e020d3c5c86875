"""Request the release of a job that the scheduler holds; the follower carries it out."""

from __future__ import annotations

from django.db import transaction
from django.utils import timezone

from jobs.errors import Conflict, Refused
from jobs.models import Attempt, Job
from jobs.queueing import queue
from jobs.waiting.blocks import kind_of
from portal.access import can, note_if_sysadmin
from portal.audit import Change
from portal.models import User


def is_held(attempt: Attempt) -> bool:
    """Return whether the scheduler holds the attempt until somebody releases it."""
    return attempt.state == Attempt.State.PENDING and bool(attempt.scheduler_id) and kind_of(attempt.reason) == "held"


def release(user: User, job: Job) -> None:
    """Have the scheduler release a held job. Raises Refused, or Conflict where nothing holds it."""
    if not can(user, "change", job):
        raise Refused(f"#{job.pk} belongs to {job.owner}.", f"Ask them or a lead of {job.project}.")
    latest = job.attempts.order_by("-number").first()
    if latest is None or not is_held(latest):
        raise Conflict(f"Not released. #{job.pk} is not held: see why it waits.")
    with transaction.atomic():
        attempt = Attempt.objects.filter(pk=latest.pk, ended_at=None, release_requested_at=None)
        if attempt.update(release_requested_at=timezone.now(), release_requested_by=user, release_outcome=""):
            note_if_sysadmin(user, "job.released", job, change=Change(before={"reason": latest.reason}))
            transaction.on_commit(lambda: queue("jobs.tasks.follow"))
