"""Calculate a job's time after it has ended: queued, allocated, and the part of that whose results were not lost."""

from __future__ import annotations

from collections import defaultdict
from datetime import UTC, datetime

from jobs.goodput import SERIES, goodput
from jobs.intake.reports import owner_of
from jobs.lease import ActiveLease
from jobs.models import Attempt, JobTime
from jobs.reliability.node_time import default_partition, partition_of
from portal.series import read

JOBS_PER_LEASE_CHECK = 25  # jobs between two checks of the lease, because each may take a while


def job_times(lock: ActiveLease, jobs: set[int], now: datetime) -> list[JobTime]:
    """Return unsaved rows for those jobs that have ended and report steps."""
    attempts: dict[int, list[Attempt]] = defaultdict(list)
    rows = Attempt.objects.filter(job__in=jobs).select_related("job", "resume_from").order_by("job", "number")
    for attempt in rows:
        attempts[attempt.job_id].append(attempt)
    owners = [owner_of(attempt.pk) for several in attempts.values() for attempt in several]
    reporting = {owners[place][1] for place in read.ids_of(owners, SERIES).values()}
    default = default_partition()
    times = []
    for number, several in enumerate(attempts.values()):
        if number % JOBS_PER_LEASE_CHECK == 0:
            lock.check()
        if reporting & {attempt.pk for attempt in several} and (time := _job_time(several, default, now)) is not None:
            times.append(time)
    return times


def _job_time(attempts: list[Attempt], default_partition: str, now: datetime) -> JobTime | None:
    last, job = attempts[-1], attempts[-1].job
    if last.ended_at is None or last.closed_at is None:
        return None
    result = goodput(attempts, now)
    if result is None:
        return None
    queued = allocated = 0.0
    for attempt in attempts:
        nodes = max(1, len(attempt.nodes))
        queued += nodes * _seconds(attempt.submitted_at, attempt.started_at or attempt.ended_at)
        allocated += nodes * _seconds(attempt.started_at, attempt.ended_at)
    named = (job.spec.get("resources") or {}).get("partition")
    return JobTime(
        job=job.pk, project_id=job.project_id, day=last.ended_at.astimezone(UTC).date(), queued_node_s=queued,
        partition=partition_of(named, default_partition), held_node_s=allocated,
        kept_node_s=result.fraction * allocated,
    )  # fmt: skip


def _seconds(since: datetime | None, until: datetime | None) -> float:
    return max(0.0, (until - since).total_seconds()) if since and until else 0.0
