"""Create finished runs and their failures, as the follower and the diagnosis would have left them."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

from django.utils import timezone

from jobs.failures import counting
from jobs.failures.kinds import MACHINES
from jobs.models import Attempt, Event, Incident, Job
from portal.models import Project, User
from tests.lab import a_job, a_project, person

HOUR = timedelta(hours=1)
NOW = timezone.now()


def ran(
    hours: float,
    *,
    nodes: list[str] | None = None,
    ago: float = 48.0,
    cause: str | None = None,
    project: str = "default",
    partition: str = "",
    gpus: int = 8,
    job: Job | None = None,
    **incident: Any,
) -> Attempt:
    """Create a closed attempt that began `ago` hours before now; with the cause of its failure, if it failed."""
    began = NOW - timedelta(hours=ago)
    ended = began + timedelta(hours=hours)
    if job is None:
        job = a_job(_somebody(project), a_project(project), state="completed" if cause is None else "failed")
        attempt = Attempt.objects.get(job=job)
        job.spec["resources"] |= {"partition": partition, "gpus_per_node": gpus}
        job.save(update_fields=["spec"])
    else:
        number = job.attempts.count() + 1
        attempt = Attempt.objects.create(job=job, number=number, state="completed", origin="restarted")
        Job.objects.filter(pk=job.pk).update(latest=attempt)
    payload = {"submitted_at": began - HOUR / 2, "started_at": began, "ended_at": ended, "closed_at": ended}
    Attempt.objects.filter(pk=attempt.pk).update(nodes=nodes or ["n0"], decided_at=ended, **payload)
    attempt.refresh_from_db()
    if cause is not None:
        failed(attempt, cause, **incident)
    return attempt


def failed(attempt: Attempt, cause: str, *, at: datetime | None = None, **fields: Any) -> Incident:
    given = {"version": 1, "is_final": True, "confidence": 0.9, "at": at or attempt.ended_at or timezone.now()}
    given["confirmed_cause"] = cause if cause in MACHINES else ""
    project = attempt.job.project
    return Incident.objects.create(attempt=attempt, project=project, cause=cause, **{**given, **fields})


def trains(attempt: Attempt, after_s: float, *, incarnation: int = 0) -> Event:
    """Let the attempt's ranks begin to train so long after its start."""
    assert attempt.started_at is not None
    at = attempt.started_at + timedelta(seconds=after_s)
    return Event.objects.create(
        attempt=attempt, kind="run.started", rank=0, incarnation=incarnation, time=at, data={"start_step": 0}
    )


def count() -> None:
    """Count until nothing is left to count."""
    while counting.count():
        pass


def _somebody(project: str) -> User:
    found = User.objects.filter(username=f"of-{project}").first()
    return found or person(f"of-{project}", Project.objects.get_or_create(slug=project)[0])
