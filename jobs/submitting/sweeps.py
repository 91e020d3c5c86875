"""What people ask of sweeps: submit and cancel. Each job of one is a job like any other.

The follower acts (jobs.following: arrays, turns). No scheduler is asked here: these functions run inside web requests.
"""

from __future__ import annotations

from hashlib import sha256

from django.db import IntegrityError, transaction
from django.db.models import OuterRef, Q, Subquery
from django.utils import timezone

from jobs import tasks
from jobs.disk import upload
from jobs.errors import Conflict, Refused
from jobs.following import after
from jobs.models import Attempt, Job, Sweep, Tag
from jobs.spec import JobSpec, SweepSpec
from jobs.submitting.admission import check
from jobs.submitting.once import answered, durable, remember
from jobs.submitting.submit import CANCEL_TRIES
from portal.access import can, note_if_sysadmin
from portal.models import Project, User

ROUTE = "sweeps"  # of idempotency keys


def submit(
    user: User, spec: SweepSpec, *, spec_toml: str, key: str | None = None, code: bytes | None = None
) -> tuple[Sweep, bool]:
    """A new sweep with all its jobs, or the one that the same request made before.

    `code` is a tar.gz of a script's directory: each job has a snapshot of its own. Raises SpecError, Refused or
    IdempotencyConflict, changing nothing.
    """
    now, zone = timezone.now(), timezone.get_default_timezone()
    specs = [point.spec.settled(now=now, zone=zone) for point in spec.points]
    project = check(user, specs[0], code=code)  # the others ask for the same
    body = sha256(b"\0".join([spec_toml.encode(), code or b""])).hexdigest()
    with durable():
        if (earlier := answered(user, ROUTE, key, body)) is not None:
            return Sweep.objects.get(pk=earlier), False
        kept = upload.keep(code) if code is not None else ""
        try:
            with transaction.atomic():
                sweep = _create(user, project, spec, spec_toml, kept)
                _create_jobs(sweep, spec, specs)
                remember(user, ROUTE, key, body, sweep.pk)
                transaction.on_commit(lambda: tasks.queue(tasks.follow))
        except IntegrityError:
            upload.forget(kept)
            if (earlier := answered(user, ROUTE, key, body)) is None:
                raise
            return Sweep.objects.get(pk=earlier), False
        except BaseException:
            upload.forget(kept)
            raise
    return sweep, True


def cancel(user: User, sweep: Sweep) -> int:
    """Ask for the end of all its jobs that have not ended; how many these were."""
    if not can(user, "change", sweep):
        raise Refused(f"Sweep {sweep.pk} belongs to {sweep.owner}.", f"Ask them or a lead of {sweep.project}.")
    asked = 0
    with durable():
        open_ones = Attempt.objects.filter(job__sweep=sweep, cancel_asked_at=None)
        open_ones = open_ones.filter(Q(ended_at=None) | Q(decided_at=None))
        for _ in range(CANCEL_TRIES):  # the follower may just have made the next attempt of one
            with transaction.atomic():
                found = open_ones.update(cancel_asked_at=timezone.now(), cancel_asked_by=user)
                if not found:
                    break
                asked += found
                transaction.on_commit(lambda: tasks.queue(tasks.follow))
        if asked:
            note_if_sysadmin(user, "sweep.cancelled", sweep)
        elif sweep.is_over():
            raise Conflict(f"Not cancelled. All jobs of sweep {sweep.pk} have already ended.")
    return asked


def _create(user: User, project: Project, spec: SweepSpec, spec_toml: str, kept: str) -> Sweep:
    sweep = Sweep(
        project=project,
        owner=user,
        name=spec.name,
        spec_toml=spec_toml,
        axes=list(spec.over.items()),
        at_once=spec.at_once,
    )
    if kept:
        sweep.key = kept  # leads the worker to the upload
    sweep.save()
    return sweep


def _create_jobs(sweep: Sweep, spec: SweepSpec, specs: list[JobSpec]) -> None:
    """In a few queries, however many they are."""
    jobs = Job.objects.bulk_create(
        [
            Job(
                project=sweep.project,
                owner=sweep.owner,
                name=one.name,
                kind=one.kind,
                spec=one.model_dump(mode="json"),
                spec_toml=point.spec_toml,
                notes=one.notes,
                sweep=sweep,
                sweep_index=index,
                sweep_values=point.values,
            )
            for index, (point, one) in enumerate(zip(spec.points, specs, strict=True))
        ],
        batch_size=100,
    )
    Tag.objects.bulk_create([Tag(job=job, name=tag) for job in jobs for tag in spec.first.tags], batch_size=500)
    reasons = [after.wait(job, spec.first.after) for job in jobs] if spec.first.after else [""] * len(jobs)
    Attempt.objects.bulk_create(
        [
            Attempt(job=job, number=1, reason=reason, steps=(job.spec.get("run") or {}).get("steps"))
            for job, reason in zip(jobs, reasons, strict=True)
        ],
        batch_size=100,
    )
    first = Attempt.objects.filter(job=OuterRef("pk")).values("pk")[:1]
    Job.objects.filter(sweep=sweep).update(latest=Subquery(first))
