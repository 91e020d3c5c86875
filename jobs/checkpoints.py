"""Checkpoints as their trainers tell of them: registered, and chosen from (jobs.intake.verify looks them through)."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from itertools import chain
from typing import Any

from django.db.models import Q
from django.utils import timezone

from jobs import starts
from jobs.models import Attempt, Checkpoint, Event
from portal import untrusted

State = Checkpoint.State


def note_event(attempt: Attempt, event: Mapping[str, Any]) -> None:
    """Keep the rows in step with what a trainer did. Called in the intake's transaction; may see an event again."""
    kind = event.get("kind")
    if attempt.job.is_attached:
        return  # they lie in a folder of their owner's: nothing of ours looks after them
    if kind == "checkpoint.committed":
        _committed(attempt, event)
    elif kind == starts.kind_of(attempt.job):
        _started(attempt, event)
    elif kind in {"checkpoint.pruned", "checkpoint.damaged"}:
        step = untrusted.count(event.get("step"))
        generation = untrusted.count(event.get("generation"), untrusted.COLUMN)
        if step is None or generation is None:
            return
        rows = Checkpoint.objects.filter(job_id=attempt.job_id, step=step, generation=generation)
        if kind == "checkpoint.pruned":
            rows.exclude(state=State.PRUNED).update(state=State.PRUNED, pinned=False)
        else:
            rows.resumable().update(state=State.CORRUPT, problem=str(event.get("reason"))[:2000])


def _started(attempt: Attempt, event: Mapping[str, Any]) -> None:
    """What the scheduler requeued finds by itself where to go on: only what runs can tell. Its own do not count."""
    if attempt.resume_from_id is not None or attempt.origin != Attempt.Origin.REQUEUED:
        return
    rows = Checkpoint.objects.filter(job_id=attempt.job_id, name=str(event.get("resumed_from"))[:100])
    found = rows.exclude(attempt=attempt).order_by("-generation").first()
    if found is not None:
        Attempt.objects.filter(pk=attempt.pk, resume_from=None).update(resume_from=found)
        attempt.resume_from = found


def _committed(attempt: Attempt, event: Mapping[str, Any]) -> None:
    step, generation = untrusted.count(event.get("step")), untrusted.count(event.get("generation"), untrusted.COLUMN)
    if step is None or generation is None:
        return
    told = {
        "parent_step": untrusted.count(event.get("parent_step")),
        "parent_generation": untrusted.count(event.get("parent_generation"), untrusted.COLUMN),
        "bytes": untrusted.count(event.get("bytes")) or 0,
        "seconds": untrusted.duration(event.get("seconds")),
        "consumed_samples": untrusted.count(event.get("consumed_samples")),
        "world_size": untrusted.count(event.get("world_size"), untrusted.COLUMN),
        "created_at": _time(event.get("time")),
    }
    plain, exact = f"step-{step}", f"step-{step}.g{generation}"
    name = exact if event.get("name") == exact else plain
    row, is_new = Checkpoint.objects.get_or_create(
        job_id=attempt.job_id, step=step, generation=generation, defaults={"attempt": attempt, "name": name, **told}
    )
    if is_new and name == plain:
        _move_aside(row)
    if is_new and _is_told_pruned(row):
        Checkpoint.objects.filter(pk=row.pk).update(state=State.PRUNED)
    # What its trainer, or we, had found damaged, it has made anew, or read through to start from it.
    corrupt = Checkpoint.objects.filter(pk=row.pk, state=State.CORRUPT)
    corrupt.update(state=State.COMMITTED, problem="", verify_tries=0, verify_after=None, **told)


def _move_aside(new: Checkpoint) -> None:
    """Another generation's checkpoint of this step stays, under the name to which its trainer moved it.

    It was the older one that moved, also where the newer one was told of first.
    """
    others = Checkpoint.objects.filter(job_id=new.job_id, step=new.step, name=new.name).exclude(pk=new.pk)
    older = list(others.filter(generation__lt=new.generation).exclude(state=State.PRUNED))
    if others.filter(generation__gt=new.generation).exists():
        older.append(new)
    for row in older:
        Checkpoint.objects.filter(pk=row.pk).update(name=f"{row.name}.g{row.generation}", problem="")


def _is_told_pruned(new: Checkpoint) -> bool:
    """Whether its end came first: after an outage the streams of two incarnations are posted in any order."""
    which = {"data__step": new.step, "data__generation": new.generation}
    return Event.objects.filter(attempt__job=new.job_id, kind="checkpoint.pruned", **which).exists()


def newest_on_line(attempt: Attempt) -> Checkpoint | None:
    """The newest resumable checkpoint on the line of descent of this attempt, never just the highest number."""
    resumable = Checkpoint.objects.resumable().filter(job=attempt.job_id).order_by("-generation", "-step")
    if not resumable.exists():  # it may have been preempted any number of times
        return None
    earlier = Attempt.objects.filter(job=attempt.job_id, number__lt=attempt.number).select_related("resume_from")
    for one in chain([attempt], earlier.order_by("-number")):  # each goes on where the one before would have
        if (newest := resumable.filter(attempt=one).first()) is not None:
            return newest
        if one.resume_from is not None:
            return _ancestor(one.resume_from)
    return None


def newest_before(attempt: Attempt, step: int) -> Checkpoint | None:
    """The newest resumable checkpoint on its line that is of this step or an earlier one."""
    own = Checkpoint.objects.resumable().filter(attempt=attempt, step__lte=step)
    if (newest := own.order_by("-generation", "-step").first()) is not None:
        return newest
    earlier = Attempt.objects.filter(job_id=attempt.job_id, number__lt=attempt.number).order_by("-number").first()
    found = attempt.resume_from or (newest_on_line(earlier) if earlier is not None else None)
    while found is not None and found.step > step:
        parent = _parent(found)
        found = _ancestor(parent) if parent is not None and parent.step < found.step else None
    return found if found is None or found.resumable else _ancestor(found)


def committed_by(attempt: Attempt) -> int:
    """How many checkpoints this attempt has committed, pruned ones included: whether it got anywhere."""
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
    """The newest committed checkpoint of some job that nobody has looked through yet, and could now."""
    is_time = Q(verify_after=None) | Q(verify_after__lte=timezone.now())
    rows = Checkpoint.objects.filter(is_time, state=State.COMMITTED, problem="").order_by("-created_at")
    return rows.select_related("job").first()


def _ancestor(checkpoint: Checkpoint) -> Checkpoint | None:
    """The nearest resumable checkpoint up the line of parents."""
    seen: set[int] = set()
    current: Checkpoint | None = checkpoint
    while current is not None and current.pk not in seen:
        if current.resumable:
            return current
        seen.add(current.pk)
        current = _parent(current)
    return None


def _parent(checkpoint: Checkpoint) -> Checkpoint | None:
    if checkpoint.parent_step is None:
        return None
    parent = Q(step=checkpoint.parent_step, generation=checkpoint.parent_generation)
    return Checkpoint.objects.filter(parent, job_id=checkpoint.job_id).first()


def _time(value: object) -> datetime:
    return untrusted.moment(value) or timezone.now()
