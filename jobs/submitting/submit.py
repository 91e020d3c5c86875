"""Submit, resume, change, pin, cancel and delete jobs. Each stores the request; the follower carries it out.

No scheduler is called here: these functions run inside web requests.
"""

from __future__ import annotations

from contextlib import ExitStack
from datetime import timedelta
from hashlib import sha256

from django.db import transaction
from django.db.models import Q
from django.utils import timezone

from jobs import checkpoints, code_permission
from jobs.disk import pins
from jobs.disk.trash import moved_to_trash
from jobs.errors import Conflict, Refused, SpecError
from jobs.following.decisions.next_attempt import next_attempt
from jobs.following.submission import dependencies
from jobs.models import Attempt, Checkpoint, Job, Sweep, Tag
from jobs.queueing import queue
from jobs.spec import JobSpec, set_values
from jobs.submitting.admission import check
from jobs.submitting.idempotency import answered, durable, make_once, remember
from portal.access import can, note, note_if_sysadmin
from portal.audit import Change
from portal.models import IdempotencyKey, Project, User
from portal.series import store

CANCEL_TRIES = 3
SAME_REQUEST = timedelta(seconds=10)
"""A cancel that is repeated within this time is the same one: a double click, or a client that tries again."""


def submit(
    user: User,
    spec: JobSpec,
    *,
    spec_toml: str,
    key: str | None = None,
    parent: Job | None = None,
    code: bytes | None = None,
) -> tuple[Job, bool]:
    """Create a job with its first attempt, or return the job that the same request created before.

    `code` is a tar.gz of its own code. Raises SpecError, Refused or IdempotencyConflict, changing nothing.
    """
    spec = spec.with_absolute_begin(now=timezone.now(), zone=timezone.get_default_timezone())
    project = check(user, spec, code=code)
    body = sha256(b"\0".join([spec_toml.encode(), str(parent and parent.pk).encode(), code or b""])).hexdigest()

    def make(upload_name: str) -> Job:
        job = _create(user, project, spec, spec_toml, parent)
        attempt = _first_attempt(job, upload_name, reason=dependencies.wait(job, spec.after))
        transaction.on_commit(lambda: queue("jobs.tasks.submit", attempt.pk))
        return job

    return make_once(Job, user, route="jobs", key=key, body=body, code=code, make=make)


def resume(
    user: User,
    job: Job,
    *,
    step: int | None = None,
    generation: int | None = None,
    steps: int | None = None,
    key: str | None = None,
) -> Attempt:
    """Create the next attempt of a job that has ended, from the newest checkpoint on its line, or the one at `step`.

    If several lines have a checkpoint of that step, the newest generation's is used, or that of `generation`. `steps`
    extends the run: a completed job needs that, or an earlier step, to have something to do.
    """
    _may_change(user, job)
    if job.is_attached:
        raise Conflict(f"Not resumed. sbatch started #{job.pk}, not Vigil: submit its script to sbatch again.")
    code_permission.check(user, JobSpec.parse(job.spec))
    route, body = f"jobs/{job.pk}/resume", sha256(f"{step} {steps} {generation or ''}".rstrip().encode()).hexdigest()
    with durable():
        if (earlier := answered(user, route, key, body)) is not None:
            return Attempt.objects.get(pk=earlier)
        with transaction.atomic():
            job = Job.objects.select_for_update().get(pk=job.pk)
            if (earlier := answered(user, route, key, body)) is not None:
                return Attempt.objects.get(pk=earlier)  # the same request, which came at once and had the lock first
            last = _resumable(job, step, steps)
            start = _start_of(job, last, step, generation)
            if steps is not None:
                _lengthen(job, steps, start)
            elif last.state == Attempt.State.COMPLETED:
                _has_work(job, start)
            attempt = next_attempt(last, Attempt.Origin.RESUMED, resume_from=start)
            remember(user, route, key, body, attempt.pk)
            about = {"attempt": attempt.number, "from": start.name if start else "the beginning", "steps": steps}
            note_if_sysadmin(user, "job.resumed", job, change=Change(after=about))
            transaction.on_commit(lambda: queue("jobs.tasks.submit", attempt.pk))
    return attempt


def change(
    user: User, job: Job, *, name: str | None = None, tags: list[str] | None = None, notes: str | None = None
) -> None:
    """Change what a person may change of a submitted job: name, tags, notes. None leaves a value as it is."""
    _may_change(user, job)
    with transaction.atomic():
        new = {key: value for key, value in (("name", name), ("tags", tags), ("notes", notes)) if value is not None}
        old = Job.objects.get(pk=job.pk)
        has = {"name": old.name, "notes": old.notes, "tags": [*old.tags.order_by("pk").values_list("name", flat=True)]}
        if tags is not None:
            job.tags.exclude(name__in=tags).delete()
            Tag.objects.bulk_create([Tag(job=job, name=tag) for tag in dict.fromkeys(tags)], ignore_conflicts=True)
        if words := {key: text for key, text in (("name", name), ("notes", notes)) if text is not None}:
            Job.objects.filter(pk=job.pk).update(**words)
        note_if_sysadmin(user, "job.changed", job, change=Change(before={key: has[key] for key in new}, after=new))


def pin(user: User, job: Job, checkpoint: Checkpoint, *, pinned: bool) -> None:
    """Protect a checkpoint from pruning, or no longer. Raises Conflict if it is gone, or was just being pruned.

    The file for its trainer is written before the folder is checked: a trainer that renamed the folder first has not
    read the file, and one that reads the file afterwards puts the folder back (training.checkpoint.pruning).
    """
    _may_change(user, job)
    _set_pinned(user, job, checkpoint, pinned)
    pins.write(job)
    if pinned and pins.is_pruned(job, checkpoint):
        _set_pinned(user, job, checkpoint, False)
        pins.write(job)
        raise Conflict(f"Not pinned. {checkpoint.name} of #{job.pk} is no longer on disk: it was just pruned.")


def cancel(user: User, job: Job, *, may_kill: bool = True) -> bool:
    """Request the end: the follower signals, waits for a last checkpoint, then kills. A due restart is called off.

    Repeated later than SAME_REQUEST, with `may_kill`, it kills at once. Return whether it does.
    """
    _may_change(user, job)
    latest = None
    for _ in range(CANCEL_TRIES):
        with durable():
            uncancelled = job.attempts.filter(cancel_asked_at=None).filter(Q(ended_at=None) | Q(decided_at=None))
            if uncancelled.update(cancel_asked_at=timezone.now(), cancel_asked_by=user):
                note_if_sysadmin(user, "job.cancelled", job, change=_end_of(job, "cancelled"))
                transaction.on_commit(lambda: queue("jobs.tasks.follow"))
                return False
        latest = job.attempts.order_by("-number").first()
        if latest is None or latest.ended_at is not None:
            break  # else the follower made it just now, while we waited for the one before
    if latest is not None and latest.cancel_asked_at is None:
        raise Conflict(f"Not cancelled. #{job.pk} has already ended: {latest.state.replace('_', ' ')}.")
    if latest is None or latest.ended_at is not None or latest.cancel_asked_at is None or not may_kill:
        return False
    if timezone.now() - latest.cancel_asked_at < SAME_REQUEST:
        return False
    kill(user, job)
    return True


def kill(user: User, job: Job) -> None:
    """End a job at once: the follower has the scheduler kill its processes, and none saves a last checkpoint."""
    if not can(user, "kill", job):
        raise Refused(f"#{job.pk} belongs to {job.owner}.", f"Ask them or a lead of {job.project}.")
    unfinished = Q(ended_at=None) | Q(decided_at=None)
    for _ in range(CANCEL_TRIES):
        with durable(), transaction.atomic():
            now = timezone.now()
            open_attempts = Attempt.objects.filter(unfinished, job=job)
            killed = open_attempts.filter(kill_requested_at=None).update(kill_requested_at=now, kill_requested_by=user)
            open_attempts.filter(cancel_asked_at=None).update(cancel_asked_at=now, cancel_asked_by=user)
            if killed:
                note(user, "job.killed", job, "no last checkpoint", _end_of(job, "killed"))
                transaction.on_commit(lambda: queue("jobs.tasks.follow"))
                return
        latest = job.attempts.order_by("-number").first()
        if latest is None or latest.ended_at is not None:
            raise Conflict(f"Not killed. #{job.pk} has already ended.")
        if latest.kill_requested_at is not None:
            return  # by an earlier request, which the follower carries out


def _end_of(job: Job, how: str) -> Change:
    """Return the change that a cancel or a kill asks for, by the attempt's state."""
    state = Attempt.objects.filter(job=job).order_by("-number").values_list("state", flat=True).first()
    return Change(before={"state": state}, after={"state": how})


def delete(user: User, job: Job) -> None:
    """Remove a job that has ended, with its run directory, metrics and checkpoints. This cannot be undone."""
    _may_change(user, job)
    with ExitStack() as undo, transaction.atomic():
        job = Job.objects.select_for_update().get(pk=job.pk)
        if Attempt.objects.filter(Q(ended_at=None) | Q(decided_at=None), job=job).exists():
            raise Conflict(f"Not deleted. #{job.pk} has not ended: cancel it first.")
        directory = job.directory
        # Locked and closed first: a report being stored ends before its series are deleted, and none begins after.
        attempts = list(job.attempts.select_for_update().order_by("pk").values_list("pk", flat=True))
        job.attempts.update(closed_at=timezone.now(), token_digest="")
        for attempt_id in attempts:
            store.drop(("attempt", attempt_id))
        IdempotencyKey.objects.filter(route="jobs", thing_id=job.pk).delete()
        sweep_id = job.sweep_id
        gone = {"name": job.name, "owner": str(job.owner), "project": str(job.project), "directory": directory}
        note_if_sysadmin(user, "job.deleted", job, change=Change(before=gone))
        job.delete()
        if sweep_id is not None and not Job.objects.filter(sweep=sweep_id).exists():
            IdempotencyKey.objects.filter(route="sweeps", thing_id=sweep_id).delete()
            Sweep.objects.filter(pk=sweep_id).delete()
        # Renamed within the transaction: if either fails, nothing is deleted; the bytes go later (tasks.empty_trash).
        undo.enter_context(moved_to_trash(directory))
        transaction.on_commit(lambda: queue("jobs.tasks.empty_trash"))


def _may_change(user: User, job: Job) -> None:
    if not can(user, "change", job):
        raise Refused(f"#{job.pk} belongs to {job.owner}.", f"Ask them or a lead of {job.project}.")


def _set_pinned(user: User, job: Job, checkpoint: Checkpoint, pinned: bool) -> None:
    """Update the row, under the lock that retention takes, so that nobody pins what retention removes."""
    with durable(), transaction.atomic():
        Job.objects.select_for_update().filter(pk=job.pk).first()
        row = Checkpoint.objects.filter(pk=checkpoint.pk).first()
        if row is None:
            raise Conflict(f"Not changed. #{job.pk} has just been deleted.")
        if pinned and row.state == Checkpoint.State.PRUNED:
            raise Conflict(f"Not pinned. {row.name} of #{job.pk} has been pruned: there is nothing left to keep.")
        unpruned = Checkpoint.objects.filter(pk=row.pk).exclude(state=Checkpoint.State.PRUNED)
        if unpruned.exclude(pinned=pinned).update(pinned=pinned):
            change = Change(before={"pinned": not pinned}, after={"pinned": pinned})
            note_if_sysadmin(user, "checkpoint.pinned" if pinned else "checkpoint.unpinned", job, row.name, change)


def _create(user: User, project: Project, spec: JobSpec, spec_toml: str, parent: Job | None) -> Job:
    job = Job.objects.create(
        project=project,
        owner=user,
        name=spec.name,
        kind=spec.kind,
        spec=spec.model_dump(mode="json"),
        spec_toml=spec_toml,
        notes=spec.notes,
        parent=parent,
    )
    Tag.objects.bulk_create([Tag(job=job, name=tag) for tag in spec.tags])
    return job


def _first_attempt(job: Job, upload_name: str, *, reason: str) -> Attempt:
    attempt = Attempt(job=job, number=1, reason=reason, steps=job.job_kind.length_of(job.spec))
    if upload_name:
        attempt.key = upload_name  # leads the worker to the upload
    attempt.save()
    job.latest = attempt
    job.save(update_fields=["latest"])
    return attempt


def _resumable(job: Job, step: int | None, steps: int | None) -> Attempt:
    """Return the job's last attempt if another one may follow it."""
    last = job.latest
    if last is None or last.ended_at is None:
        raise Conflict(f"Not resumed. #{job.pk} has not ended: it is {last.state if last else 'being made'}.")
    if not job.owner.is_active:
        why = f"The account of {job.owner} is deactivated, so nothing is started in that name."
        raise Conflict(f"Not resumed. {why} Clone #{job.pk} to run it in your name.")
    if last.decided_at is None:
        raise Conflict(f"Not resumed. Vigil is still deciding how #{job.pk} continues. Try again in a few seconds.")
    if last.state == Attempt.State.COMPLETED and step is None and steps is None:
        raise Conflict(
            f"#{job.pk} has completed. Choose the {job.job_kind.unit} to run again from, or how many"
            f" {job.job_kind.units} to run."
        )
    if steps is not None and not job.job_kind.length:
        raise SpecError.at("steps", "Only Vigil's trainer has steps; your own program takes them as an argument.")
    return last


def _start_of(job: Job, last: Attempt, step: int | None, generation: int | None) -> Checkpoint | None:
    """Return the checkpoint to start from, or None to start from the beginning if there is none at all."""
    if step is None:
        return checkpoints.newest_on_line(last)
    resumable = Checkpoint.objects.resumable().filter(job=job)
    exact = {} if generation is None else {"generation": generation}
    chosen = resumable.filter(step=step, **exact).order_by("-generation").first()
    if chosen is None:
        there = sorted(set(resumable.values_list("step", flat=True)), key=lambda s: abs(s - step))[:5]
        nearest = (
            f"Nearest: {', '.join(f'{s:,}' for s in sorted(there))}."
            if there
            else "There is no checkpoint to resume from."
        )
        raise SpecError.at(job.job_kind.unit, f"No checkpoint at {job.job_kind.unit} {step:,}. {nearest}")
    return chosen


def _has_work(job: Job, start: Checkpoint | None) -> None:
    """Raise Conflict unless a completed job has steps left beyond the checkpoint."""
    steps, many = job.job_kind.length_of(job.spec), job.job_kind.units
    if start is not None and steps is not None and start.step >= steps:
        raise Conflict(
            f"Not resumed. All {steps:,} {many} of #{job.pk} are done at that checkpoint."
            f" Choose an earlier one, or how many {many} to run."
        )


def _lengthen(job: Job, steps: int, start: Checkpoint | None) -> None:
    """Change how far the job runs: in the spec, and in its text, where comments and order stay."""
    if start is not None and steps <= start.step:
        raise SpecError.at(
            job.job_kind.units, f"{steps:,} is not beyond the checkpoint at {job.job_kind.unit} {start.step:,}."
        )
    field = job.job_kind.length
    text = set_values(job.spec_toml, {f"run.{field}": steps})
    spec = JobSpec.parse({**job.spec, "run": {**job.spec["run"], field: steps}})
    job.spec, job.spec_toml = spec.model_dump(mode="json"), text
    job.save(update_fields=["spec", "spec_toml"])
