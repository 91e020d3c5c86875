"""What people handed to Slurm past Vigil and had followed (`vigil attach`): is it theirs, and what does it ask for?

Anybody may claim any number. So nothing is done about, or told of, a scheduler's job until the scheduler itself has
said that it is of that person's user: `submitted_at` is then set. What is somebody else's, or Vigil's own, ends here.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from typing import Any

from django.utils import timezone

from jobs import live
from jobs.following import ending
from jobs.following.cause import Ended
from jobs.following.tick import TickContext, logger
from jobs.models import Attempt, Job, Stray, Sweep
from jobs.spec import limit_of
from nodes.cluster import sync
from nodes.models import QueuedJob, Reading
from nodes.schedulers.base import UNKNOWN, JobStatus

UNHEARD_FOR = timedelta(seconds=5)  # before a scheduler that does not know it is believed
_ODD = re.compile(r"[^A-Za-z0-9._-]+")


def confirm(tick: TickContext, attempt: Attempt, status: JobStatus | None) -> bool:
    """Whether the scheduler says that it is this person's. If it says otherwise the attempt has ended."""
    if status is None:
        _not_there(tick, attempt)
        return False
    if not status.user and status.state == UNKNOWN:
        return False  # not told yet
    if status.user != attempt.scheduler_user:
        refuse(tick, attempt)
        return False
    if is_vigils(status):
        refuse(tick, attempt, f"{attempt.scheduler_id} is a job of Vigil's own, which is followed already.")
        return False
    count = max(status.restart_count, attempt.scheduler_restart_count)  # its own script may know of a requeue first
    submitted = datetime.fromtimestamp(status.submitted_at, UTC) if status.submitted_at else timezone.now()
    with tick.held.writing():
        rows = Attempt.objects.filter(pk=attempt.pk, ended_at=None)
        rows.update(submitted_at=submitted, scheduler_restart_count=count, unknown_since=None)
        live.announce(attempt.pk)
    attempt.submitted_at, attempt.scheduler_restart_count, attempt.unknown_since = submitted, count, None
    logger.info("attempt %s: %s is %s's, attached", attempt.pk, attempt.scheduler_id, attempt.scheduler_user)
    sync.hurry(Reading.Part.QUEUE)  # for what it asks for
    return True


def is_vigils(status: JobStatus) -> bool:
    """Whether Vigil submitted it: it carries a key of ours, or is followed as an ordinary job's."""
    followed = Attempt.objects.alive().filter(scheduler_id=status.scheduler_id).exclude(job__kind=Job.ATTACHED)
    if followed.exists():
        return True
    return bool(status.keys) and any(rows.filter(key__in=status.keys).exists() for rows in _KEYED)


def refuse(tick: TickContext, attempt: Attempt, reason: str = "") -> None:
    """The end of a claim that does not hold: nothing of that job is told, and no report is taken any more."""
    now = timezone.now()
    reason = reason or f"Slurm has no job {attempt.scheduler_id} of yours. `squeue --me` lists them."
    closed: dict[str, Any] = {"decided_at": now, "closed_at": now, "token_digest": "", "slurm_steps_at": now}
    with tick.held.writing():
        ending.end(attempt, Ended("failed"), cause="rejected", reason=reason, **closed)


def describe(tick: TickContext) -> None:
    """Write into their specs what Slurm says that they ask for, once the queue has told it."""
    untold = Attempt.objects.alive().confirmed().filter(job__kind=Job.ATTACHED, job__spec__resources__isnull=True)
    waiting = {attempt.scheduler_id: attempt for attempt in untold.select_related("job")[:200]}
    for row in QueuedJob.objects.filter(scheduler_id__in=waiting, is_made_up=False):
        attempt = waiting[row.scheduler_id]
        if row.user == attempt.scheduler_user:
            with tick.held.writing():
                _describe(attempt.job, row)
                live.announce(attempt.pk)


def name_of(row: QueuedJob) -> str:
    """Its name in Slurm, as far as a job of ours may be called so."""
    return _ODD.sub("-", row.name)[:64].strip("-._") or f"slurm-{row.scheduler_id}"


def resources_of(row: QueuedJob) -> dict[str, Any]:
    """What it asks for, in the words of [resources]; CPUs, GPUs and memory of a node."""
    nodes = max(1, row.node_count)
    told: dict[str, Any] = {
        "nodes": nodes,
        "gpus_per_node": -(-row.gpus // nodes),
        "gpu_type": "" if row.gpus_by_type else row.gpu_type,  # of several types one would be wrong for all
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
    return {name: value for name, value in told.items() if value not in ("", None)}


def _not_there(tick: TickContext, attempt: Attempt) -> None:
    now = timezone.now()
    if attempt.unknown_since is None:
        tick.note(attempt, unknown_since=now)
    elif now - attempt.unknown_since > UNHEARD_FOR:
        refuse(tick, attempt)


def _describe(job: Job, row: QueuedJob) -> None:
    spec = {**job.spec, "resources": resources_of(row)}
    if "name" not in spec:
        spec["name"] = name_of(row)
        Job.objects.filter(pk=job.pk, name=f"slurm-{row.scheduler_id}").update(name=spec["name"])
    Job.objects.filter(pk=job.pk).update(spec=spec)


_KEYED = (Attempt.objects, Sweep.objects, Stray.objects)
