"""Submit and cancel sweeps. Each job of a sweep is a job like any other.

The follower carries requests out (jobs.following: arrays, sweep_limit). No scheduler is called here, inside web
requests.
"""

from __future__ import annotations

from hashlib import sha256

from django.db import transaction
from django.db.models import OuterRef, Q, Subquery
from django.utils import timezone

from jobs.errors import Conflict, Refused
from jobs.following.submission import dependencies
from jobs.models import Attempt, Job, Sweep, Tag
from jobs.queueing import queue
from jobs.spec import JobSpec, SweepSpec
from jobs.submitting.admission import check
from jobs.submitting.idempotency import durable, make_once
from jobs.submitting.submit import CANCEL_TRIES
from portal import bulk
from portal.access import can, note_if_sysadmin
from portal.audit import Change
from portal.models import Project, User


def submit(
    user: User, spec: SweepSpec, *, spec_toml: str, key: str | None = None, code: bytes | None = None
) -> tuple[Sweep, bool]:
    """Create a sweep with all its jobs, or return the one that the same request created before.

    `code` is a tar.gz of a script's directory: each job has its own snapshot. Raises SpecError, Refused or
    IdempotencyConflict, changing nothing.
    """
    now, zone = timezone.now(), timezone.get_default_timezone()
    specs = [point.spec.with_absolute_begin(now=now, zone=zone) for point in spec.points]
    project = check(user, specs[0], code=code, others=specs[1:])
    body = sha256(b"\0".join([spec_toml.encode(), code or b""])).hexdigest()

    sweep = _sweep(user, project, spec, spec_toml)
    jobs = _SweepJobs(sweep, spec, specs)

    def make(upload_name: str) -> Sweep:
        if upload_name:
            sweep.key = upload_name  # leads the worker to the upload
        sweep.save()
        jobs.insert()
        transaction.on_commit(lambda: queue("jobs.tasks.follow"))
        return sweep

    return make_once(Sweep, user, route="sweeps", key=key, body=body, code=code, make=make)


def cancel(user: User, sweep: Sweep) -> int:
    """Request the end of all its jobs that have not ended. Return how many these were."""
    if not can(user, "change", sweep):
        raise Refused(f"Sweep {sweep.pk} belongs to {sweep.owner}.", f"Ask them or a lead of {sweep.project}.")
    count = 0
    with durable():
        open_attempts = Attempt.objects.filter(job__sweep=sweep, cancel_asked_at=None)
        open_attempts = open_attempts.filter(Q(ended_at=None) | Q(decided_at=None))
        for _ in range(CANCEL_TRIES):  # the follower may just have made the next attempt of one
            with transaction.atomic():
                cancelled = open_attempts.update(cancel_asked_at=timezone.now(), cancel_asked_by=user)
                if not cancelled:
                    break
                count += cancelled
                transaction.on_commit(lambda: queue("jobs.tasks.follow"))
        if count:
            note_if_sysadmin(user, "sweep.cancelled", sweep, change=Change(after={"jobs": count}))
        elif sweep.is_over():
            raise Conflict(f"Not cancelled. All jobs of sweep {sweep.pk} have already ended.")
    return count


def _sweep(user: User, project: Project, spec: SweepSpec, spec_toml: str) -> Sweep:
    return Sweep(
        project=project,
        owner=user,
        name=spec.name,
        spec_toml=spec_toml,
        axes=list(spec.over.items()),
        refused=[[point.values, point.message] for point in spec.refused],
        at_once=spec.at_once,
    )


class _SweepJobs:
    """A sweep's jobs and their first attempts, prepared before the transaction that inserts them."""

    def __init__(self, sweep: Sweep, spec: SweepSpec, specs: list[JobSpec]) -> None:
        self.sweep, self.spec = sweep, spec
        self.jobs = [
            Job(
                project=sweep.project,
                owner=sweep.owner,
                name=job_spec.name,
                kind=job_spec.kind,
                spec=job_spec.model_dump(mode="json"),
                spec_toml=point.spec_toml,
                notes=job_spec.notes,
                sweep_index=index,
                sweep_values=point.values,
            )
            for index, (point, job_spec) in enumerate(zip(spec.points, specs, strict=True))
        ]
        reason = dependencies.reason_to_wait(spec.first.after) if spec.first.after else ""
        self.attempts = [Attempt(number=1, steps=job.job_kind.length_of(job.spec), reason=reason) for job in self.jobs]
        self.new_jobs, self.new_attempts = bulk.NewRows(self.jobs), bulk.NewRows(self.attempts)
        self.has_keys = self.new_jobs.reserve_keys() and self.new_attempts.reserve_keys()

    def insert(self) -> None:
        """Insert them in a few statements, however many they are."""
        self.new_jobs.point_to("sweep", [self.sweep] * len(self.jobs))
        if self.has_keys:
            self.new_jobs.point_to("latest", self.attempts)
        self.new_jobs.insert()
        tags = ((job.pk, tag) for job in self.jobs for tag in self.spec.first.tags)
        bulk.insert_rows(Tag, ("job", "name"), tags)
        self.new_attempts.point_to("job", self.jobs)
        self.new_attempts.insert()
        if self.spec.first.after:
            dependencies.wait_together(self.jobs, self.spec.first.after)
        if not self.has_keys:
            first = Attempt.objects.filter(job=OuterRef("pk")).values("pk")[:1]
            Job.objects.filter(sweep=self.sweep).update(latest=Subquery(first))
