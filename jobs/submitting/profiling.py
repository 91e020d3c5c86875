"""Request a profile of the next steps of a running job."""

from __future__ import annotations

import secrets

from django.utils import timezone

from jobs import live, profiles
from jobs.disk import profiles as files
from jobs.errors import Conflict, Refused, SpecError
from jobs.incarnations import size_of
from jobs.models import Attempt, Event, Job
from portal.access import can, note_if_sysadmin
from portal.audit import Change
from portal.models import User

STEPS, MAX_STEPS = 5, 100


def request_profile(user: User, job: Job, *, steps: int = STEPS, rank: int = 0) -> str:
    """Request a profile and return its id.

    The rank begins at a step boundary about a second from now, and reports the end. Raises Refused, Conflict if
    none of Vigil's trainers runs now, ProfileError before the attempt has begun, or SpecError.
    """
    if not can(user, "change", job):
        raise Refused(f"#{job.pk} belongs to {job.owner}.", f"Ask them or a lead of {job.project}.")
    if not job.job_kind.profiles:
        raise Conflict(f"Not profiled. {_why_not(job)}")
    attempt = job.latest
    if attempt is None or attempt.state != Attempt.State.RUNNING:
        raise Conflict(f"Not profiled. #{job.pk} is not running: it is {attempt.state if attempt else 'being made'}.")
    if not 1 <= steps <= MAX_STEPS:
        raise SpecError.at("steps", f"{steps:,} is out of range: use 1 to {MAX_STEPS}.")
    attempt = Attempt.objects.select_related("job").get(pk=attempt.pk)
    running = size_of(attempt)
    if running is not None and rank >= running.ranks:  # perhaps a rank of a lost node: it would never respond
        raise SpecError.at("rank", f"there is no rank {rank:,} now: use 0 to {running.ranks - 1:,}.")
    number = secrets.token_hex(4)
    files.request_profile(attempt, number=number, rank=rank, steps=steps)
    data = {"id": number, "steps": steps, "rank": rank, "by": user.username}
    Event.objects.create(attempt=attempt, time=timezone.now(), kind=profiles.REQUESTED, data=data)
    note_if_sysadmin(user, "job.profiled", job, change=Change(after={"rank": rank, "steps": steps}))
    live.announce(attempt.pk)
    return number


def _why_not(job: Job) -> str:
    if job.job_kind.trains:
        return f"#{job.pk} counts {job.job_kind.units}, each of many clients: its page shows how their time is spent."
    return f"#{job.pk} runs your own program, which must profile itself."
