"""Create the next attempt of a job; of two processes the first one creates it."""

from __future__ import annotations

from collections.abc import Sequence

from jobs import blamed_nodes, checkpoints
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
    """Create one more attempt of the same job, due to be submitted. Needs a transaction.

    It excludes `excluded_nodes`: by default the nodes blamed for the ends of earlier attempts. A chosen start of the
    last attempt applies until something has been saved since, unless a person resumes it elsewhere. Raises Conflict if
    another process created the attempt first.
    """
    if Attempt.objects.filter(job_id=last.job_id, number__gt=last.number).exists():
        raise Conflict(f"#{last.job_id} was just restarted by somebody else.")
    is_requeued = origin == Attempt.Origin.REQUEUED
    if is_requeued:  # Slurm requeues it with the options of its submission
        excluded_nodes = last.excluded_nodes
    if origin != Attempt.Origin.RESUMED and not starts_back and last.has_chosen_start:
        starts_back = not checkpoints.committed_by(last)
        resume_from = last.resume_from if starts_back and is_requeued else resume_from
    if excluded_nodes is None:
        excluded_nodes = blamed_nodes.excluded_nodes(last.job, before=last.number + 1)
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
