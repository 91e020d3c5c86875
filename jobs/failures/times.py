"""What became of a job's time, once it has ended: queued, held, and of that the steps whose work is still there."""

from __future__ import annotations

from collections import defaultdict
from datetime import UTC, datetime

from jobs.goodput import SERIES, goodput
from jobs.intake.reports import owner_of
from jobs.lease import Held
from jobs.models import Attempt, JobTime
from jobs.reliability.held import default_partition, partition_of
from portal.series import read

FEW = 25  # jobs between two looks at the lease: each may take a while


def of_jobs(held: Held, jobs: set[int], now: datetime) -> list[JobTime]:
    """Of those that have ended and report steps; rows that are not written yet."""
    attempts: dict[int, list[Attempt]] = defaultdict(list)
    rows = Attempt.objects.filter(job__in=jobs).select_related("job", "resume_from").order_by("job", "number")
    for one in rows:
        attempts[one.job_id].append(one)
    owners = [owner_of(one.pk) for several in attempts.values() for one in several]
    told = {owners[place][1] for place in read.ids_of(owners, SERIES).values()}
    default = default_partition()
    found = []
    for number, several in enumerate(attempts.values()):
        if number % FEW == 0:
            held.check()
        if told & {one.pk for one in several} and (time := _of_job(several, default, now)) is not None:
            found.append(time)
    return found


def _of_job(attempts: list[Attempt], default_partition: str, now: datetime) -> JobTime | None:
    last, job = attempts[-1], attempts[-1].job
    if last.ended_at is None or last.closed_at is None:
        return None
    told = goodput(attempts, now)
    if told is None:
        return None
    queued = held = 0.0
    for one in attempts:
        nodes = max(1, len(one.nodes))
        queued += nodes * _seconds(one.submitted_at, one.started_at or one.ended_at)
        held += nodes * _seconds(one.started_at, one.ended_at)
    return JobTime(
        job=job.pk, project_id=job.project_id, day=last.ended_at.astimezone(UTC).date(), queued_node_s=queued,
        partition=partition_of((job.spec.get("resources") or {}).get("partition"), default_partition), held_node_s=held,
        kept_node_s=told.fraction * held,
    )  # fmt: skip


def _seconds(since: datetime | None, until: datetime | None) -> float:
    return max(0.0, (until - since).total_seconds()) if since and until else 0.0
