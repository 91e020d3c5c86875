"""Attach a job that somebody submitted to Slurm outside Vigil (`vigil attach`): Vigil then follows it.

Slurm is not called here. What the stored queue contradicts is refused at once; the follower checks with Slurm whom the
job belongs to before it does or shows anything (jobs.following.attached).
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
from jobs.following.decisions.next_attempt import next_attempt
from jobs.models import Attempt, Job, Tag
from jobs.queueing import queue
from jobs.submitting.admission import check_slurm_user
from jobs.submitting.idempotency import durable
from nodes.models import QueuedJob
from nodes.schedulers import choose
from portal.access import can
from portal.models import DEFAULT_PROJECT, Project, User

NOT_YOURS = "Slurm has no job {} of yours.", "`squeue --me` lists them."
UNCONFIRMED = "Waiting for Slurm to confirm the owner."
TEXT = "# Started by sbatch outside Vigil; Vigil follows it.\n"
REQUEUED_WITHIN = timedelta(days=7)  # of its end: later the number may be another job's


@dataclass(frozen=True, kw_only=True)
class AttachClaim:
    """A person's claim on a job. `restart_count`: from the job's own script; None from anywhere else."""

    scheduler_id: str
    restart_count: int | None = None
    name: str = ""
    project: str = ""
    tags: tuple[str, ...] = ()
    notes: str = ""
    directory: str = ""  # where it runs, for people to read: the portal opens nothing there
    command: str = ""


@dataclass(frozen=True)
class AttachResult:
    """The attempt that follows the run. `created`: there was none before."""

    attempt: Attempt
    created: bool


def attach(user: User, claim: AttachClaim) -> AttachResult:
    """Return the attempt that follows this run. Repeated for a live run it returns the same one.

    Raises Refused, SpecError, or Conflict if Vigil does not know of a requeue yet: the client tries again.
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
        several = f"{row.scheduler_id} is an array, and each of its tasks is a job."
        raise Refused(f"Not attached: {several}", f"Name one, such as {row.scheduler_id}_0.")
    with durable(), transaction.atomic():
        User.objects.select_for_update().get(pk=user.pk)  # two at once make one
        existing = _existing_attempt(user, claim)
        if existing is not None:
            return AttachResult(existing, created=False)
        _refuse_vigil_job(user, claim)
        attempt = _create(user, _project(user, claim.project), claim, row)
        transaction.on_commit(lambda: queue("jobs.tasks.follow"))
    return AttachResult(attempt, created=True)


def _existing_attempt(user: User, claim: AttachClaim) -> Attempt | None:
    """Return the attempt that already follows this run, or continues its job after a requeue."""
    claims = Attempt.objects.filter(job__kind=Job.ATTACHED, job__owner=user, scheduler_user=user.slurm_user)
    claims = claims.filter(scheduler_id=claim.scheduler_id).select_related("job").order_by("-pk")
    last, restart_count = claims.first(), claim.restart_count
    if last is None:
        return None
    if last.ended_at is None:
        if restart_count is None or restart_count == last.scheduler_restart_count:
            return last
        if last.submitted_at is None:
            Attempt.objects.filter(pk=last.pk).update(scheduler_restart_count=restart_count)
            last.scheduler_restart_count = restart_count
            return last
        if restart_count > last.scheduler_restart_count:
            raise Conflict(f"Vigil does not know yet that Slurm requeued {claim.scheduler_id}. Try again in a moment.")
        raise Conflict(f"Slurm has requeued {claim.scheduler_id} since: that run is over.")
    is_late = last.ended_at < timezone.now() - REQUEUED_WITHIN
    if restart_count is None or restart_count <= last.scheduler_restart_count or last.submitted_at is None or is_late:
        return None
    following = next_attempt(last, Attempt.Origin.REQUEUED)  # requeued manually after its end
    following.scheduler_id, following.scheduler_user = last.scheduler_id, last.scheduler_user
    following.scheduler_restart_count = restart_count
    following.submitting_at = timezone.now()
    following.reason = UNCONFIRMED
    following.save()
    return following


def _refuse_vigil_job(user: User, claim: AttachClaim) -> None:
    """Refuse a job that Vigil submitted: it is already followed."""
    followed = Attempt.objects.alive().filter(scheduler_id=claim.scheduler_id).exclude(job__kind=Job.ATTACHED)
    attempt = followed.select_related("job").first()
    if attempt is None:
        return
    if attempt.scheduler_user != user.slurm_user:
        raise _not_yours(claim)
    raise Refused(
        f"Not attached: {claim.scheduler_id} was submitted by Vigil as #{attempt.job_id}, which it already follows."
    )


def _project(user: User, slug: str) -> Project:
    """Return the named project; else the default one, or the person's only one."""
    there = {project.slug: project for project in Project.objects.visible_to(user) if can(user, "submit", project)}
    if slug in there:
        return there[slug]
    default = next((project for project in there.values() if project.slug == DEFAULT_PROJECT), None)
    default = default or next((project for project in there.values() if project.is_default), None)
    if slug in {"", DEFAULT_PROJECT} and default is not None:
        return default
    if not slug and len(there) == 1:
        return next(iter(there.values()))
    slugs = ", ".join(sorted(there)[:20])
    remedy = f"Choose one of {slugs}." if slugs else "You are in no project yet: ask a sysadmin to add you to one."
    raise SpecError.at("project", f'"{slug}" is not a project of yours. {remedy}' if slug else remedy)


def _create(user: User, project: Project, claim: AttachClaim, row: QueuedJob | None) -> Attempt:
    details = {name: value for name, value in asdict(claim).items() if value and name in _SPEC_FIELDS}
    spec: dict[str, Any] = {**details, "kind": Job.ATTACHED, "project": project.slug, "tags": list(claim.tags)}
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


def _not_yours(claim: AttachClaim) -> Refused:
    reason, remedy = NOT_YOURS
    return Refused(reason.format(claim.scheduler_id), remedy)


_SPEC_FIELDS = frozenset({"name", "notes", "directory", "command"})
