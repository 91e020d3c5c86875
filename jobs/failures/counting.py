"""Update the statistics of the reliability page: allocated node time, failures, and the useful time of jobs.

Rows that changed are marked (`is_counted`) and found by that mark, however late they change: an attempt once, when it
has closed; an incident with each version of its verdict, and with a person's correction.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Any, TypeVar

from django.db import DataError
from django.db.models import Exists, OuterRef, Q
from django.utils import timezone

from jobs import lease
from jobs.failures import job_times, sums
from jobs.failures.incidents import SETTLED_AFTER, fields_of
from jobs.lease import ActiveLease
from jobs.models import Attempt, Failure, Incident
from jobs.reliability.node_time import allocations, default_partition

logger = logging.getLogger(__name__)

BUDGET_S = 10.0
ROWS = 200  # attempts per transaction, because reports wait for it on SQLite
NODE_DAYS = 1_000  # per transaction, about 60 ms; an attempt with more has its own
INCIDENTS_PER_TRANSACTION = 25  # incidents per transaction: each takes several queries, and the lease expires
RECHECKED_PER_RUN = 200  # failures rechecked at random until their successors are known

Row = TypeVar("Row", Attempt, Incident)
Fields = dict[str, Any] | None


def count(budget_s: float = BUDGET_S) -> int:
    """Bring the sums up to date, for about `budget_s` seconds; return how many rows were counted.

    A lease keeps other processes out: if two read and wrote sums at once, one update would be lost.
    """
    now = timezone.now()
    closed = Attempt.objects.filter(is_counted=False).exclude(closed_at=None).select_related("job")
    incidents = Incident.objects.filter(is_counted=False).select_related("attempt__job", "failure")
    unsettled = _unsettled(now)
    if not (closed.exists() or incidents.exists() or unsettled.exists()):
        return 0
    lock = lease.take("reliability")
    if lock is None:
        return 0
    try:
        until = time.monotonic() + budget_s
        done = _count_incidents(lock, _batches(incidents, until, INCIDENTS_PER_TRANSACTION), now)
        again = list(unsettled.order_by("?").values_list("incident", flat=True)[:RECHECKED_PER_RUN])
        followed = Incident.objects.filter(pk__in=again).select_related("attempt__job", "failure")
        _count_incidents(lock, _batches(followed, until, INCIDENTS_PER_TRANSACTION), now)
        return done + _count_attempts(lock, _batches(closed, until, ROWS, _short_batch), now)
    finally:
        lock.release()


def _unsettled(now: datetime) -> Any:
    """Return failures that may still change, except while the attempt that should resume is waiting to start."""
    attempt = "incident__attempt"
    waits = Attempt.objects.filter(
        job=OuterRef(f"{attempt}__job"), number=OuterRef(f"{attempt}__number") + 1, started_at=None, ended_at=None
    )
    rows = Failure.objects.filter(is_settled=False).exclude(incident=None)
    return rows.filter(~Exists(waits) | Q(at__lt=now - SETTLED_AFTER))


def _batches(rows: Any, until: float, most: int, cut: Callable[[list[Any]], list[Any]] = list) -> Any:
    """Yield batches of rows by id until there are none left or time is up."""
    last = 0
    while time.monotonic() < until:
        batch = cut(list(rows.filter(pk__gt=last).order_by("pk")[:most]))
        if not batch:
            return
        yield batch
        last = batch[-1].pk


def _write_batch(batch: Sequence[Row], write: Callable[[Sequence[Row]], None]) -> int:
    """Write a batch in one transaction; if the database rejects a value, row by row, skipping the invalid one."""
    try:
        write(batch)
    except DataError:
        if len(batch) == 1:
            logger.exception("reliability: %s can't be counted, and is left out", batch[0])
            type(batch[0])._default_manager.filter(pk=batch[0].pk).update(is_counted=True)
        else:
            for row in batch:
                _write_batch([row], write)
    return len(batch)


def _count_incidents(lock: ActiveLease, batches: Any, now: datetime) -> int:
    default = default_partition()

    def write(batch: Sequence[Incident]) -> None:
        pairs = [
            (incident, None if incident.attempt.is_unconfirmed else fields_of(incident, default, now))
            for incident in batch
        ]
        if changed := [(incident, fields) for incident, fields in pairs if _differs(incident, fields)]:
            with lock.writing():
                for incident, fields in changed:
                    _write(incident, fields)

    return sum(_write_batch(batch, write) for batch in batches)


def _differs(incident: Incident, fields: Fields) -> bool:
    """Return whether there is anything to write. Attempts that are not confirmed to be the user's have no failures."""
    before = getattr(incident, "failure", None)
    if not incident.is_counted or before is None or fields is None:
        return not incident.is_counted or before is not fields
    return any(getattr(before, name) != value for name, value in fields.items())


def _write(incident: Incident, fields: Fields) -> None:
    """Write the failure, unless the incident has changed since it was read: then the next run finds it."""
    unchanged = Incident.objects.filter(
        pk=incident.pk, version=incident.version, overruled_cause=incident.overruled_cause, is_final=incident.is_final
    )
    if unchanged.update(is_counted=True) != 1:
        return
    if fields is None:
        Failure.objects.filter(incident=incident).delete()
    else:
        Failure.objects.update_or_create(incident=incident, defaults=fields)


def _count_attempts(lock: ActiveLease, batches: Any, now: datetime) -> int:
    def write(batch: Sequence[Attempt]) -> None:
        confirmed = {attempt.pk for attempt in batch if not attempt.is_unconfirmed and attempt.started_at is not None}
        found = allocations(Attempt.objects.filter(pk__in=confirmed), now)
        added = sums.prepare(found, job_times.job_times(lock, {attempt.job_id for attempt in batch}, now))
        with lock.writing():
            added.write()
            Attempt.objects.filter(pk__in=[attempt.pk for attempt in batch]).update(is_counted=True)

    return sum(_write_batch(batch, write) for batch in batches)


def _short_batch(rows: list[Attempt]) -> list[Attempt]:
    """Return the first of these attempts, as many as make a short transaction."""
    total = 0
    for place, attempt in enumerate(rows):
        days = (attempt.ended_at - attempt.started_at).days + 1 if attempt.started_at and attempt.ended_at else 0
        total += len(attempt.nodes) * days
        if place and total > NODE_DAYS:
            return rows[:place]
    return rows
