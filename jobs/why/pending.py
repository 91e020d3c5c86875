"""Why a person's job waits: the rows that `explain` needs, and what it says of one that does not wait."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime

from django.urls import reverse
from django.utils import timezone
from django.utils.http import urlencode

from jobs import suspects
from jobs.disk import missing
from jobs.errors import SpecError
from jobs.models import Attempt, Job
from jobs.spec import JobSpec
from jobs.why.explain import Waiting, Why, explain
from jobs.why.reasons import explained_of, reason_of
from jobs.why.requests import request_of, request_outside
from jobs.why.variants import Variant, as_options
from nodes.cluster import read, sync
from nodes.models import Reading
from nodes.scheduling.capacity import Request
from portal.models import User
from vigil_core import formatting


@dataclass(frozen=True)
class Told:
    """Why it waits as of `told_at`, when the scheduler last spoke of its queue and nodes; or that it does not."""

    job: Job
    attempt: Attempt
    text: str
    why: Why | None = None
    told_at: datetime | None = None
    stale: str = ""  # why that is long ago
    now: datetime | None = None

    @property
    def offers(self) -> list[tuple[str, list[tuple[Variant, str]]]]:
        """Variants by what they promise, each with the address of the form filled in with it."""
        found = self.why.variants if self.why else ()
        parts = (("What would start now", True), ("There would be room for", False))
        told = [(head, [(v, form_url(self.job.pk, v)) for v in found if v.starts_now is now]) for head, now in parts]
        return [(head, variants) for head, variants in told if variants]

    @property
    def starts_at(self) -> datetime | None:
        """The scheduler's own guess."""
        if self.why is None or self.why.starts_at is None:
            return None
        return datetime.fromtimestamp(self.why.starts_at, tz=timezone.get_current_timezone())


def why(user: User, job: Job, attempt: Attempt | None = None, *, now: datetime | None = None) -> Told:
    """Why the job's latest attempt waits, to this person, who may see it. No scheduler is asked."""
    attempt = attempt or job.latest
    assert attempt is not None
    now = now or timezone.now()
    if attempt.is_unconfirmed:  # who knows whose it is
        return Told(job, attempt, attempt.reason, now=now)
    if attempt.state != Attempt.State.PENDING:
        return Told(job, attempt, _not_waiting(attempt, now), now=now)
    if gone := missing.problem(attempt):
        return Told(job, attempt, gone, now=now)
    asked = _asked(job, attempt)
    if asked is None:
        return Told(job, attempt, explained_of(attempt) or "It is in the queue.", now=now)
    there = read.read(now)
    spec, request = asked
    found = explain(
        Waiting(
            spec=spec,
            request=request,
            reason=attempt.reason.strip(),
            scheduler_id=attempt.scheduler_id,
            job_id=job.pk,
            you=user.slurm_user or "",
            names=names(user),
            held_by_vigil=not attempt.scheduler_id,
        ),
        there,
    )
    read_at, stale = _readings()
    text = "It is being cancelled." if attempt.cancel_asked_at else found.sentence
    return Told(job, attempt, text or "It is in the queue.", found, read_at, stale, now)


def _asked(job: Job, attempt: Attempt) -> tuple[JobSpec | None, Request] | None:
    """What it asks for, and the specification, if Vigil submitted it; None where that cannot be told."""
    if job.is_attached:
        told = job.spec.get("resources")
        return (None, request_outside(told, user=attempt.scheduler_user)) if told else None
    try:
        spec = suspects.without(JobSpec.parse(job.spec), attempt)
    except SpecError:  # one of an older release: nothing can be said of other shapes of it
        return None
    return spec, request_of(spec, user=attempt.scheduler_user, account=job.project.slurm_account)


def names(user: User) -> Mapping[str, str]:
    """Jobs in the scheduler's hands by name, of those that the person may see: "#12 wren" by the scheduler's id."""
    alive = Attempt.objects.alive().confirmed().exclude(scheduler_id="")
    known = list(alive.values_list("scheduler_id", "job_id"))
    # By their numbers: in one question SQLite would look through all jobs that the person may see.
    jobs = Job.objects.visible_to(user).only("name").in_bulk({number for _, number in known})
    return {scheduler_id: f"#{number} {jobs[number].name}" for scheduler_id, number in known if number in jobs}


def form_url(job_id: int, variant: Variant) -> str:
    """The form for a new job like this one, filled in with the variant."""
    query = [("from", str(job_id)), *(("set", option) for option in as_options(variant.changes))]
    return f"{reverse('submit')}?{urlencode(query)}"


def _readings() -> tuple[datetime | None, str]:
    """The time at which nodes and queue were last read, the older of both, and what has failed since."""
    readings = sync.readings()
    parts = [readings[Reading.Part.NODES.value], readings[Reading.Part.QUEUE.value]]
    times = [reading.read_at for reading in parts]
    return min((at for at in times if at), default=None), next((part.error for part in parts if part.error), "")


def _not_waiting(attempt: Attempt, now: datetime) -> str:
    where = f" on {formatting.listed([*attempt.nodes][:3])}" if attempt.nodes else ""
    if attempt.is_alive:
        state = "running" if attempt.state == Attempt.State.RUNNING else formatting.word(attempt.state)
        since = f" since {formatting.clock(attempt.started_at, now)}" if attempt.started_at else ""
        return f"It does not wait: it is {state}{since}{where}."
    at = f" at {formatting.clock(attempt.ended_at, now)}" if attempt.ended_at else ""
    ended = f"It does not wait: it ended as {formatting.word(attempt.state)}{at}."
    return f"{ended} {_ending(attempt)}".strip()


def _ending(attempt: Attempt) -> str:
    """Why it ended, as its page says it."""
    text = reason_of(attempt)
    return text if not text or text[-1] in ".!?…" else f"{text}."
