"""One more attempt of a job: who makes it first has made it."""

from __future__ import annotations

from collections.abc import Sequence

from jobs import checkpoints, suspects
from jobs.errors import Conflict
from jobs.models import Attempt, Checkpoint, Job


def next_attempt(
    last: Attempt,
    origin: str,
    *,
    resume_from: Checkpoint | None = None,
    starts_back: bool = False,
    excluded_nodes: Sequence[str] | None = None,
) -> Attempt:
    """One more attempt of the same job, due to be submitted. In a transaction; whoever comes second gets Conflict.

    It is kept from `excluded_nodes`: if none are given, those to blame for the ends of those before it. Where the last
    one was to start is kept until something has been saved since, unless a person says otherwise.
    """
    if Attempt.objects.filter(job_id=last.job_id, number__gt=last.number).exists():
        raise Conflict(f"#{last.job_id} was started anew by somebody else just now.")
    is_requeued = origin == Attempt.Origin.REQUEUED
    if is_requeued:  # as it was asked for when it was submitted
        excluded_nodes = last.excluded_nodes
    if origin != Attempt.Origin.RESUMED and not starts_back and last.has_chosen_start:
        starts_back = not checkpoints.committed_by(last)
        resume_from = last.resume_from if starts_back and is_requeued else resume_from
    if excluded_nodes is None:
        excluded_nodes = suspects.kept_from(last.job, before=last.number + 1)
    attempt = Attempt.objects.create(
        job_id=last.job_id,
        number=last.number + 1,
        origin=origin,
        resume_from=resume_from,
        starts_back=starts_back,
        excluded_nodes=list(excluded_nodes),
        step=resume_from.step if resume_from is not None else None,
        steps=last.steps,
    )
    Job.objects.filter(pk=last.job_id).update(latest=attempt)
    return attempt
