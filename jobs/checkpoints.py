"""Choose from the checkpoints of a job (jobs.intake writes their rows, jobs.intake.verify verifies them)."""

from __future__ import annotations

from itertools import chain

from django.db.models import Q
from django.utils import timezone

from jobs.models import Attempt, Checkpoint

State = Checkpoint.State


def newest_on_line(attempt: Attempt) -> Checkpoint | None:
    """Return the newest resumable checkpoint on the line of descent of this attempt, never just the highest number."""
    resumable = Checkpoint.objects.resumable().filter(job=attempt.job_id).order_by("-generation", "-step")
    if not resumable.exists():  # it may have been preempted any number of times
        return None
    earlier = Attempt.objects.filter(job=attempt.job_id, number__lt=attempt.number).select_related("resume_from")
    for candidate in chain([attempt], earlier.order_by("-number")):  # each continues where the one before would have
        if (newest := resumable.filter(attempt=candidate).first()) is not None:
            return newest
        if candidate.resume_from is not None:
            return _ancestor(candidate.resume_from)
    return None


def newest_before(attempt: Attempt, step: int) -> Checkpoint | None:
    """Return the newest resumable checkpoint on its line of this step or an earlier one."""
    rows = Checkpoint.objects.resumable().filter(attempt=attempt, step__lte=step)
    if (newest := rows.order_by("-generation", "-step").first()) is not None:
        return newest
    earlier = Attempt.objects.filter(job_id=attempt.job_id, number__lt=attempt.number).order_by("-number").first()
    checkpoint = attempt.resume_from or (newest_on_line(earlier) if earlier is not None else None)
    while checkpoint is not None and checkpoint.step > step:
        parent = _parent(checkpoint)
        checkpoint = _ancestor(parent) if parent is not None and parent.step < checkpoint.step else None
    return checkpoint if checkpoint is None or checkpoint.resumable else _ancestor(checkpoint)


def committed_by(attempt: Attempt) -> int:
    """Return how many checkpoints this attempt has committed, pruned ones included: whether it made progress."""
    return Checkpoint.objects.filter(attempt=attempt).count()


def last_write_seconds(job_id: int) -> float | None:
    """Return how long the newest checkpoint of a job took to write, for the grace period that stopping needs.

    The trainer reports it. It is believed up to the time for which the portal saw that attempt run.
    """
    rows = Checkpoint.objects.filter(job_id=job_id, seconds__isnull=False).select_related("attempt")
    newest = rows.order_by("-created_at").only("seconds", "attempt__started_at", "attempt__ended_at").first()
    if newest is None or newest.seconds is None:
        return None
    since, until = newest.attempt.started_at, newest.attempt.ended_at or timezone.now()
    return newest.seconds if since is None else min(newest.seconds, max(0.0, (until - since).total_seconds()))


def due_for_verification() -> Checkpoint | None:
    """Return the newest committed checkpoint that has not been verified yet and may be tried now."""
    is_time = Q(verify_after=None) | Q(verify_after__lte=timezone.now())
    rows = Checkpoint.objects.filter(is_time, state=State.COMMITTED, problem="").order_by("-created_at")
    return rows.select_related("job").first()


def _ancestor(checkpoint: Checkpoint) -> Checkpoint | None:
    """Return the nearest resumable checkpoint up the line of parents."""
    visited: set[int] = set()
    current: Checkpoint | None = checkpoint
    while current is not None and current.pk not in visited:
        if current.resumable:
            return current
        visited.add(current.pk)
        current = _parent(current)
    return None


def _parent(checkpoint: Checkpoint) -> Checkpoint | None:
    if checkpoint.parent_step is None:
        return None
    parent = Q(step=checkpoint.parent_step, generation=checkpoint.parent_generation)
    return Checkpoint.objects.filter(parent, job_id=checkpoint.job_id).first()
