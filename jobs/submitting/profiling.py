"""Asking for a profile of the steps that come next, of a job that runs."""

from __future__ import annotations

import secrets

from django.utils import timezone

from jobs import live, profiles
from jobs.disk import profiles as files
from jobs.errors import Conflict, Refused, SpecError
from jobs.incarnations import spread
from jobs.models import Attempt, Event, Job
from portal.access import can, note_if_sysadmin
from portal.audit import Change
from portal.models import User

STEPS, MOST_STEPS = 5, 100


def ask(user: User, job: Job, *, steps: int = STEPS, rank: int = 0) -> str:
    """Answers the profile's id. Its rank begins at a step boundary about a second from now, and tells when it is done.

    Raises Refused, Conflict where nothing of ours trains now, ProfileError where it has not begun, or SpecError.
    """
    if not can(user, "change", job):
        raise Refused(f"#{job.pk} belongs to {job.owner}.", f"Ask them or a lead of {job.project}.")
    if not job.of_kind.profiles:
        raise Conflict(f"Not profiled. {_why_not(job)}")
    attempt = job.latest
    if attempt is None or attempt.state != Attempt.State.RUNNING:
        raise Conflict(f"Not profiled. #{job.pk} is not running: it is {attempt.state if attempt else 'being made'}.")
    if not 1 <= steps <= MOST_STEPS:
        raise SpecError.at("steps", f"{steps:,} is too many to write down: take 1 to {MOST_STEPS}.")
    attempt = Attempt.objects.select_related("job").get(pk=attempt.pk)
    running = spread(attempt)
    if running is not None and rank >= running.ranks:  # perhaps it was one of a node that is gone: nobody would answer
        raise SpecError.at("rank", f"there is no rank {rank:,} now: take 0 to {running.ranks - 1:,}.")
    number = secrets.token_hex(4)
    files.ask(attempt, number=number, rank=rank, steps=steps)
    data = {"id": number, "steps": steps, "rank": rank, "by": user.username}
    Event.objects.create(attempt=attempt, time=timezone.now(), kind=profiles.ASKED, data=data)
    note_if_sysadmin(user, "job.profiled", job, change=Change(after={"rank": rank, "steps": steps}))
    live.announce(attempt.pk)
    return number


def _why_not(job: Job) -> str:
    if job.of_kind.trains:
        return f"#{job.pk} counts {job.of_kind.many}, each of many clients: where their seconds go its page shows."
    return f"#{job.pk} runs a program of its own, which profiles itself."
