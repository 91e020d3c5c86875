"""Follow jobs that people submitted to Slurm outside Vigil and attached (`vigil attach`).

Anybody may claim any number. So nothing is done about a scheduler's job, and nothing of it is shown, until the
scheduler itself has confirmed that it belongs to that person's user: `submitted_at` is then set. A claim on somebody
else's job, or on one that Vigil submitted, ends here.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from typing import Any

from django.utils import timezone

from jobs import live
from jobs.following import ending
from jobs.following.end_causes.cause import AttemptEnd
from jobs.following.tick_context import TickContext, logger
from jobs.models import Attempt, Job, Stray, Sweep
from jobs.spec import limit_of
from nodes.cluster import sync
from nodes.models import QueuedJob, Reading
from nodes.schedulers.base import UNKNOWN, JobStatus

UNCONFIRMED_FOR = timedelta(seconds=5)  # how long a job may be missing from the scheduler before the claim is refused
_DISALLOWED = re.compile(r"[^A-Za-z0-9._-]+")


def confirm(tick: TickContext, attempt: Attempt, status: JobStatus | None) -> bool:
    """Return whether the scheduler confirms that the job belongs to this person. If it denies that, end the attempt."""
    if status is None:
        _note_missing(tick, attempt)
        return False
    if not status.user and status.state == UNKNOWN:
        return False  # not known yet
    if status.user != attempt.scheduler_user:
        refuse(tick, attempt)
        return False
    if is_vigil_job(status):
        refuse(tick, attempt, f"{attempt.scheduler_id} was submitted by Vigil, which already follows it.")
        return False
    count = max(status.restart_count, attempt.scheduler_restart_count)  # its own script may know of a requeue first
    submitted = datetime.fromtimestamp(status.submitted_at, UTC) if status.submitted_at else timezone.now()
    with tick.lease.writing():
        rows = Attempt.objects.filter(pk=attempt.pk, ended_at=None)
        rows.update(submitted_at=submitted, scheduler_restart_count=count, unknown_since=None)
        live.announce(attempt.pk)
    attempt.submitted_at, attempt.scheduler_restart_count, attempt.unknown_since = submitted, count, None
    logger.info("attempt %s: %s is %s's, attached", attempt.pk, attempt.scheduler_id, attempt.scheduler_user)
    sync.hurry(Reading.Part.QUEUE)  # the queue has its resources
    return True


def is_vigil_job(status: JobStatus) -> bool:
    """Return whether Vigil submitted the job: it carries one of Vigil's keys, or an ordinary job follows it."""
    followed = Attempt.objects.alive().filter(scheduler_id=status.scheduler_id).exclude(job__kind=Job.ATTACHED)
    if followed.exists():
        return True
    return bool(status.keys) and any(rows.filter(key__in=status.keys).exists() for rows in _MODELS_WITH_KEYS)


def refuse(tick: TickContext, attempt: Attempt, reason: str = "") -> None:
    """End a claim that does not hold: nothing of that job is shown, and no more reports are accepted."""
    now = timezone.now()
    reason = reason or f"Slurm has no job {attempt.scheduler_id} of yours. `squeue --me` lists them."
    closed: dict[str, Any] = {"decided_at": now, "closed_at": now, "token_digest": "", "slurm_steps_at": now}
    with tick.lease.writing():
        ending.end(attempt, AttemptEnd("failed"), cause="rejected", reason=reason, **closed)


def describe(tick: TickContext) -> None:
    """Write what attached jobs requested of Slurm into their specs, once the queue has been read."""
    undescribed = Attempt.objects.alive().confirmed().filter(job__kind=Job.ATTACHED, job__spec__resources__isnull=True)
    waiting = {attempt.scheduler_id: attempt for attempt in undescribed.select_related("job")[:200]}
    for row in QueuedJob.objects.filter(scheduler_id__in=waiting, is_made_up=False):
        attempt = waiting[row.scheduler_id]
        if row.user == attempt.scheduler_user:
            with tick.lease.writing():
                _describe(attempt.job, row)
                live.announce(attempt.pk)


def name_of(row: QueuedJob) -> str:
    """Return the job's name in Slurm, reduced to what a job's name in Vigil may be."""
    return _DISALLOWED.sub("-", row.name)[:64].strip("-._") or f"slurm-{row.scheduler_id}"


def resources_of(row: QueuedJob) -> dict[str, Any]:
    """Return what the job requests under the names of [resources], with CPUs, GPUs and memory per node."""
    nodes = max(1, row.node_count)
    resources: dict[str, Any] = {
        "nodes": nodes,
        "gpus_per_node": -(-row.gpus // nodes),
        "gpu_type": "" if row.gpus_by_type else row.gpu_type,  # with several types, any one of them would be wrong
        "cpus_per_node": -(-row.cpus // nodes),
        "memory_gib": round(row.memory_mib / nodes / 1024, 2) or None,
        "time_limit": limit_of(row.time_limit_s) if row.time_limit_s else None,
        "partition": row.partition,
        "account": row.account,
        "qos": row.qos,
        "reservation": row.reservation,
        "constraint": row.features,
        "licenses": row.licenses,
    }
    return {name: value for name, value in resources.items() if value not in ("", None)}


def _note_missing(tick: TickContext, attempt: Attempt) -> None:
    now = timezone.now()
    if attempt.unknown_since is None:
        tick.note(attempt, unknown_since=now)
    elif now - attempt.unknown_since > UNCONFIRMED_FOR:
        refuse(tick, attempt)


def _describe(job: Job, row: QueuedJob) -> None:
    spec = {**job.spec, "resources": resources_of(row)}
    if "name" not in spec:
        spec["name"] = name_of(row)
        Job.objects.filter(pk=job.pk, name=f"slurm-{row.scheduler_id}").update(name=spec["name"])
    Job.objects.filter(pk=job.pk).update(spec=spec)


_MODELS_WITH_KEYS = (Attempt.objects, Sweep.objects, Stray.objects)
