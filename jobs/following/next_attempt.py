"""One more attempt of a job: who makes it first has made it."""

from __future__ import annotations

from jobs import suspects
from jobs.errors import Conflict
from jobs.models import Attempt, Checkpoint, Job


def next_attempt(
    last: Attempt, origin: str, *, resume_from: Checkpoint | None = None, starts_back: bool = False
) -> Attempt:
    """One more attempt of the same job, due to be submitted. In a transaction; whoever comes second gets Conflict.

    It is kept from the nodes that were to blame for the ends of those before it.
    """
    if Attempt.objects.filter(job_id=last.job_id, number__gt=last.number).exists():
        raise Conflict(f"#{last.job_id} was started anew by somebody else just now.")
    attempt = Attempt.objects.create(
        job_id=last.job_id,
        number=last.number + 1,
        origin=origin,
        resume_from=resume_from,
        starts_back=starts_back,
        excluded_nodes=suspects.kept_from(last.job, before=last.number + 1),
        step=resume_from.step if resume_from is not None else None,
        steps=last.steps,
    )
    Job.objects.filter(pk=last.job_id).update(latest=attempt)
    return attempt
