"""Explain why a person's job waits: gather the rows that `explain` needs, and describe a job that does not wait."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime

from django.urls import reverse
from django.utils import timezone
from django.utils.http import urlencode

from jobs import blamed_nodes
from jobs.disk import missing
from jobs.errors import SpecError
from jobs.models import Attempt, Job
from jobs.spec import JobSpec
from jobs.waiting.explain import WaitExplanation, WaitingJob, explain
from jobs.waiting.reasons import explained_of, reason_of
from jobs.waiting.requests import request_of, request_of_attached
from jobs.waiting.variants import Variant, as_options
from nodes.cluster import read, sync
from nodes.models import Reading
from nodes.scheduling.capacity import Request
from portal.models import User
from vigil_core import formatting


@dataclass(frozen=True)
class WaitReport:
    """Why a job waits, as of `read_at`, when nodes and queue were last read; or that it does not wait."""

    job: Job
    attempt: Attempt
    text: str
    why: WaitExplanation | None = None
    read_at: datetime | None = None
    stale: str = ""  # why that is long ago
    now: datetime | None = None
    avoids: Mapping[str, str] = field(default_factory=dict)
    """Nodes that it was submitted without, and why."""

    @property
    def variants_by_promise(self) -> list[tuple[str, list[tuple[Variant, str]]]]:
        """Return variants grouped by heading, each with the address of the form filled in with it."""
        found = self.why.variants if self.why else ()
        parts = (("Would start now", True), ("Would fit, behind other jobs", False))
        variants_by_heading = [
            (head, [(v, form_url(self.job.pk, v)) for v in found if v.starts_now is now]) for head, now in parts
        ]
        return [(head, variants) for head, variants in variants_by_heading if variants]

    @property
    def starts_at(self) -> datetime | None:
        """Return the scheduler's own estimate of its start."""
        if self.why is None or self.why.starts_at is None:
            return None
        return datetime.fromtimestamp(self.why.starts_at, tz=timezone.get_current_timezone())


def why(user: User, job: Job, attempt: Attempt | None = None, *, now: datetime | None = None) -> WaitReport:
    """Return why the job's latest attempt waits, for a person who may see it, without calling the scheduler."""
    attempt = attempt or job.latest
    assert attempt is not None
    now = now or timezone.now()
    if attempt.is_unconfirmed:  # its owner is not confirmed
        return WaitReport(job, attempt, attempt.reason, now=now)
    if attempt.state != Attempt.State.PENDING:
        return WaitReport(job, attempt, _not_waiting(attempt, now), now=now)
    if gone := missing.problem(attempt):
        return WaitReport(job, attempt, gone, now=now)
    requested = _requested(job, attempt)
    if requested is None:
        return WaitReport(job, attempt, explained_of(attempt) or "It is in the queue.", now=now)
    there = read.read(now)
    spec, request = requested
    explanation = explain(
        WaitingJob(
            spec=spec,
            request=request,
            reason=attempt.reason.strip(),
            scheduler_id=attempt.scheduler_id,
            job_id=job.pk,
            you=user.slurm_user or "",
            names=names(user),
            waits_in_vigil=not attempt.scheduler_id,
            maintenance=read.maintenance(),
        ),
        there,
    )
    read_at, stale = _readings()
    text = "It is being cancelled." if attempt.cancel_asked_at else explanation.sentence
    avoids = blamed_nodes.exclusion_reasons(attempt)
    return WaitReport(job, attempt, text or "It is in the queue.", explanation, read_at, stale, now, avoids)


def _requested(job: Job, attempt: Attempt) -> tuple[JobSpec | None, Request] | None:
    """Return the specification, if Vigil submitted it, and the request; None if that is unknown."""
    if job.is_attached:
        resources = job.spec.get("resources")
        return (None, request_of_attached(resources, user=attempt.scheduler_user)) if resources else None
    try:
        spec = blamed_nodes.with_exclusions(JobSpec.parse(job.spec), attempt)
    except SpecError:  # from an older release: no variants can be proposed
        return None
    return spec, request_of(spec, user=attempt.scheduler_user, account=job.project.slurm_account)


def names(user: User) -> Mapping[str, str]:
    """Return the names of jobs in the scheduler that the person may see: "#12 wren" by scheduler id."""
    alive = Attempt.objects.alive().confirmed().exclude(scheduler_id="")
    rows = list(alive.values_list("scheduler_id", "job_id"))
    # By their ids: in one query SQLite would scan all jobs that the person may see.
    jobs = Job.objects.visible_to(user).only("name").in_bulk({number for _, number in rows})
    return {scheduler_id: f"#{number} {jobs[number].name}" for scheduler_id, number in rows if number in jobs}


def form_url(job_id: int, variant: Variant) -> str:
    """Return the address of the form for a new job like this one, filled in with the variant."""
    query = [("from", str(job_id)), *(("set", option) for option in as_options(variant.changes))]
    return f"{reverse('submit')}?{urlencode(query)}"


def _readings() -> tuple[datetime | None, str]:
    """Return when nodes and queue were last read, the older of the two, and what has failed since."""
    readings = sync.readings()
    parts = [readings[Reading.Part.NODES.value], readings[Reading.Part.QUEUE.value]]
    times = [reading.read_at for reading in parts]
    return min((at for at in times if at), default=None), next((part.error for part in parts if part.error), "")


def _not_waiting(attempt: Attempt, now: datetime) -> str:
    where = f" on {formatting.listed([*attempt.nodes][:3])}" if attempt.nodes else ""
    if attempt.is_alive:
        state = "running" if attempt.state == Attempt.State.RUNNING else formatting.word(attempt.state)
        since = f" since {formatting.clock(attempt.started_at, now)}" if attempt.started_at else ""
        return f"It is not waiting: it is {state}{since}{where}."
    at = f" at {formatting.clock(attempt.ended_at, now)}" if attempt.ended_at else ""
    ended = f"It is not waiting: it ended as {formatting.word(attempt.state)}{at}."
    return f"{ended} {_ending(attempt)}".strip()


def _ending(attempt: Attempt) -> str:
    """Return why it ended, as on its page."""
    text = reason_of(attempt)
    return text if not text or text[-1] in ".!?…" else f"{text}."
