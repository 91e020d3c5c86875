"""Query which nodes attempts had allocated on which days, for running and just-ended attempts that the sums lack."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta
from typing import Any

from django.db.models import F, Q
from django.db.models.fields.json import KeyTextTransform, KeyTransform

from jobs.models import Attempt
from nodes.models import Partition

MAX_ATTEMPTS = 5_000
"""Number of newest attempts that are examined; more hardly ever run at once."""
MAX_NAME = 255
WEEK = 7
DAY_S = 86_400
_EPOCH = date(1970, 1, 1).toordinal()


@dataclass(frozen=True)
class AttemptAllocation:
    """The nodes of one attempt, its project and partition."""

    attempt: int
    job: int
    project: int
    partition: str
    nodes: list[str]
    gpus_per_node: int
    since: datetime
    until: datetime

    def days(self, first: date = date.min) -> Iterator[tuple[date, float]]:
        """Yield (UTC day, seconds on that day), from `first` on."""
        at, end = self._begin(first).timestamp(), self.until.timestamp()
        number = int(at // DAY_S)
        while at < end:
            number += 1
            yield date.fromordinal(_EPOCH + number - 1), min(number * DAY_S, end) - at
            at = number * DAY_S

    def seconds(self, first: date) -> float:
        """Return the total seconds from `first` on."""
        return max(0.0, (self.until - self._begin(first)).total_seconds())

    def _begin(self, first: date) -> datetime:
        return max(self.since, datetime.combine(first, time(), UTC))


def uncounted(now: datetime, *, most: int = MAX_ATTEMPTS) -> list[AttemptAllocation]:
    """Return allocations that the sums lack, newest first."""
    rows = Attempt.objects.confirmed().filter(is_counted=False).exclude(started_at=None)
    return allocations(rows.order_by("-pk")[:most], now)


def allocations(attempts: Any, now: datetime) -> list[AttemptAllocation]:
    """Return the allocations of the attempts in a query."""
    default, resources = default_partition(), KeyTransform("resources", "job__spec")
    rows = attempts.annotate(
        gpus=KeyTextTransform("gpus_per_node", resources),
        partition=KeyTextTransform("partition", resources),
        project=F("job__project"),
    ).values_list("pk", "job", "project", "partition", "nodes", "gpus", "started_at", "ended_at")
    return [
        AttemptAllocation(
            pk, job, project, partition_of(partition, default), nodes or [], whole(gpus), since, until or now
        )
        for pk, job, project, partition, nodes, gpus, since, until in rows
        if since is not None
    ]


def monday(day: date) -> date:
    """Return the Monday of the day's week."""
    return day - timedelta(days=day.weekday())


def rows_since(first_day: date) -> Q:
    """Select the rows of sums that make up the days from this one on: single days up to a Monday, then whole weeks."""
    week = monday(first_day + timedelta(days=6))
    return Q(days=WEEK, day__gte=week) | Q(days=1, day__gte=first_day, day__lt=week)


def default_partition() -> str:
    """Return the partition of jobs that name none; "" if the scheduler has no default."""
    return Partition.objects.filter(is_default=True).values_list("name", flat=True).first() or ""


def partition_of(named: object, default: str) -> str:
    """Return a spec's partition, truncated since jobs from outside Vigil may contain any text."""
    return str(named or "")[:MAX_NAME] or default


def whole(value: object) -> int:
    """Return a number from JSON, which databases return as a number or as text; 0 if it is neither."""
    try:
        return max(0, int(value))  # type: ignore[call-overload,no-any-return]
    except (TypeError, ValueError):
        return 0
