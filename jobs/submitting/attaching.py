"""`vigil attach`: have what somebody handed to Slurm past Vigil followed, as a job that Vigil did not submit.

Nothing is asked of Slurm here. What the queue's rows say already is refused at once; whose it is in the end the
follower hears from Slurm before it does or tells anything (jobs.following.attached).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

from django.conf import settings
from django.db import transaction
from django.utils import timezone

from jobs.errors import Conflict, Refused, SpecError
from jobs.following.attached import name_of, resources_of
from jobs.following.next_attempt import next_attempt
from jobs.models import Attempt, Job, Tag
from jobs.queueing import queue
from jobs.submitting.admission import check_slurm_user
from jobs.submitting.idempotency import durable
from nodes.models import QueuedJob
from nodes.schedulers import choose
from portal.access import can
from portal.models import DEFAULT_PROJECT, Project, User

NOT_YOURS = "Slurm has no job {} of yours.", "`squeue --me` lists them."
UNCONFIRMED = "Vigil waits for Slurm to say whose it is."
TEXT = "# Started with sbatch outside Vigil, which follows it.\n"
REQUEUED_WITHIN = timedelta(days=7)  # of its end: later the number may be another job's


@dataclass(frozen=True, kw_only=True)
class Claim:
    """What somebody says is theirs. `restart_count`: told by its own script; None from anywhere else."""

    scheduler_id: str
    restart_count: int | None = None
    name: str = ""
    project: str = ""
    tags: tuple[str, ...] = ()
    notes: str = ""
    directory: str = ""  # where it runs, for people to read: the portal opens nothing there
    command: str = ""


@dataclass(frozen=True)
class Attached:
    """`created`: there was none before."""

    attempt: Attempt
    created: bool


def attach(user: User, claim: Claim) -> Attached:
    """The attempt that follows this run of it. Said again of one that lives it is the same one, however often.

    Raises Refused, SpecError, or Conflict where Vigil has yet to hear of a requeue: ask again.
    """
    if not choose.capabilities_of(settings.VIGIL_SCHEDULER).can_attach:
        raise Refused(
            "Not attached: this portal has no Slurm (VIGIL_SCHEDULER=local).", "Submit the run with `vigil submit`."
        )
    check_slurm_user(user, doing="attached")
    row = QueuedJob.objects.filter(scheduler_id=claim.scheduler_id, is_made_up=False).first()
    if row is not None and row.user != user.slurm_user:
        raise _not_yours(claim)
    if row is not None and row.tasks > 1:
        several = f"{row.scheduler_id} is an array whose tasks are jobs of their own."
        raise Refused(f"Not attached: {several}", f"Name one, such as {row.scheduler_id}_0.")
    with durable(), transaction.atomic():
        User.objects.select_for_update().get(pk=user.pk)  # two at once make one
        known = _known(user, claim)
        if known is not None:
            return Attached(known, created=False)
        _refuse_vigils(user, claim)
        attempt = _create(user, _project(user, claim.project), claim, row)
        transaction.on_commit(lambda: queue("jobs.tasks.follow"))
    return Attached(attempt, created=True)


def _known(user: User, claim: Claim) -> Attempt | None:
    """The attempt that follows this run already, or goes on with its job after a requeue."""
    mine = Attempt.objects.filter(job__kind=Job.ATTACHED, job__owner=user, scheduler_user=user.slurm_user)
    mine = mine.filter(scheduler_id=claim.scheduler_id).select_related("job").order_by("-pk")
    last, told = mine.first(), claim.restart_count
    if last is None:
        return None
    if last.ended_at is None:
        if told is None or told == last.scheduler_restart_count:
            return last
        if last.submitted_at is None:
            Attempt.objects.filter(pk=last.pk).update(scheduler_restart_count=told)
            last.scheduler_restart_count = told
            return last
        if told > last.scheduler_restart_count:
            raise Conflict(f"Vigil has not heard yet that Slurm requeued {claim.scheduler_id}. Ask again in a moment.")
        raise Conflict(f"Slurm has requeued {claim.scheduler_id} since: that run is over.")
    is_late = last.ended_at < timezone.now() - REQUEUED_WITHIN
    if told is None or told <= last.scheduler_restart_count or last.submitted_at is None or is_late:
        return None
    following = next_attempt(last, Attempt.Origin.REQUEUED)  # requeued by hand after its end
    following.scheduler_id, following.scheduler_user = last.scheduler_id, last.scheduler_user
    following.scheduler_restart_count = told
    following.submitting_at = timezone.now()
    following.reason = UNCONFIRMED
    following.save()
    return following


def _refuse_vigils(user: User, claim: Claim) -> None:
    """One that Vigil submitted is followed as what it is."""
    ours = Attempt.objects.alive().filter(scheduler_id=claim.scheduler_id).exclude(job__kind=Job.ATTACHED)
    attempt = ours.select_related("job").first()
    if attempt is None:
        return
    if attempt.scheduler_user != user.slurm_user:
        raise _not_yours(claim)
    raise Refused(f"Not attached: {claim.scheduler_id} is #{attempt.job_id} of Vigil's own, which is followed already.")


def _project(user: User, slug: str) -> Project:
    """The one that is named; else the default one, or the only one that the person belongs to."""
    there = {project.slug: project for project in Project.objects.visible_to(user) if can(user, "submit", project)}
    if slug in there:
        return there[slug]
    default = next((project for project in there.values() if project.slug == DEFAULT_PROJECT), None)
    default = default or next((project for project in there.values() if project.is_default), None)
    if slug in {"", DEFAULT_PROJECT} and default is not None:
        return default
    if not slug and len(there) == 1:
        return next(iter(there.values()))
    mine = ", ".join(sorted(there)[:20])
    remedy = f"Choose one of {mine}." if mine else "You belong to none yet: ask a sysadmin to add you to one."
    raise SpecError.at("project", f'"{slug}" is not a project of yours. {remedy}' if slug else remedy)


def _create(user: User, project: Project, claim: Claim, row: QueuedJob | None) -> Attempt:
    told = {name: value for name, value in asdict(claim).items() if value and name in _TOLD}
    spec: dict[str, Any] = {**told, "kind": Job.ATTACHED, "project": project.slug, "tags": list(claim.tags)}
    if row is not None:
        spec |= {"name": claim.name or name_of(row), "resources": resources_of(row)}
    name = spec.get("name") or f"slurm-{claim.scheduler_id}"
    job = Job.objects.create(
        project=project, owner=user, name=name, kind=Job.ATTACHED, spec=spec, spec_toml=TEXT, notes=claim.notes
    )
    Tag.objects.bulk_create([Tag(job=job, name=tag) for tag in dict.fromkeys(claim.tags)])
    attempt = Attempt.objects.create(
        job=job,
        number=1,
        scheduler_id=claim.scheduler_id,
        scheduler_user=user.slurm_user or "",
        scheduler_restart_count=claim.restart_count or 0,
        submitting_at=timezone.now(),
        reason=UNCONFIRMED,
    )
    job.latest = attempt
    job.save(update_fields=["latest"])
    return attempt


def _not_yours(claim: Claim) -> Refused:
    reason, remedy = NOT_YOURS
    return Refused(reason.format(claim.scheduler_id), remedy)


_TOLD = frozenset({"name", "notes", "directory", "command"})
