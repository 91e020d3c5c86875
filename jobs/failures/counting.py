"""Counts what reliability is told from: the time that nodes were held, failures, and what of a job's time is kept.

Whatever has changed is marked (`is_counted`) and found here by that mark, however late it comes: an attempt once it has
closed, and once; an incident with each version of its verdict, and with a person's word.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import datetime
from typing import Any

from django.utils import timezone

from jobs import lease
from jobs.failures import sums, times
from jobs.failures.incidents import fields_of
from jobs.lease import Held
from jobs.models import Attempt, Failure, Incident
from jobs.reliability.held import default_partition, holdings

BUDGET_S = 10.0
ROWS = 200  # of a transaction: reports wait for it on SQLite
FEW = 25  # incidents of a transaction: each takes several queries, and the lease ends
AGAIN = 200  # failures that are looked at once more, by chance, until what follows them is known


def count(budget_s: float = BUDGET_S) -> int:
    """Bring the sums in step with what has happened since, for about so long; how many rows were counted.

    One process does it at a time: of two that read and write sums, one's would be lost.
    """
    now = timezone.now()
    closed = Attempt.objects.filter(is_counted=False).exclude(closed_at=None).select_related("job")
    incidents = Incident.objects.filter(is_counted=False).select_related("attempt__job")
    unsettled = Failure.objects.filter(is_settled=False).exclude(incident=None)
    if not (closed.exists() or incidents.exists() or unsettled.exists()):
        return 0
    held = lease.take("reliability")
    if held is None:
        return 0
    try:
        until = time.monotonic() + budget_s
        done = _count_incidents(held, _each(incidents, until, FEW), now)
        again = list(unsettled.order_by("?").values_list("incident", flat=True)[:AGAIN])
        followed = Incident.objects.filter(pk__in=again).select_related("attempt__job")
        _count_incidents(held, _each(followed, until, FEW), now)
        return done + _count_attempts(held, _each(closed, until, ROWS), now)
    finally:
        held.release()


def _each(rows: Any, until: float, most: int) -> Any:
    """Some rows after the other, by number, until there are none or it is time."""
    last = 0
    while time.monotonic() < until:
        some = list(rows.filter(pk__gt=last).order_by("pk")[:most])
        if not some:
            return
        yield some
        last = some[-1].pk


def _count_incidents(held: Held, several: Any, now: datetime) -> int:
    done, default = 0, default_partition()
    for some in several:
        told = [(one, fields_of(one, default, now)) for one in some if not one.attempt.is_unconfirmed]
        with held.writing():
            for incident, fields in told:
                _write(incident, fields)
            _mark_strangers(some, {one.pk for one, _ in told})
        done += len(some)
    return done


def _write(incident: Incident, fields: dict[str, Any] | None) -> None:
    """Its failure as it was read; where the incident has changed since, the next look finds it."""
    same = Incident.objects.filter(
        pk=incident.pk, version=incident.version, overruled_cause=incident.overruled_cause, is_final=incident.is_final
    )
    if same.update(is_counted=True) != 1:
        return
    if fields is None:
        Failure.objects.filter(incident=incident).delete()
    else:
        Failure.objects.update_or_create(incident=incident, defaults=fields)


def _mark_strangers(some: Sequence[Incident], known: set[int]) -> None:
    """Of attempts that only somebody says are theirs nothing counts."""
    Incident.objects.filter(pk__in={one.pk for one in some} - known).update(is_counted=True)


def _count_attempts(held: Held, several: Any, now: datetime) -> int:
    done = 0
    for some in several:
        known = {one.pk for one in some if not one.is_unconfirmed and one.started_at is not None}
        found = holdings(Attempt.objects.filter(pk__in=known), now)
        jobs = times.of_jobs(held, {one.job_id for one in some}, now)
        with held.writing():
            sums.add(found, jobs)
            Attempt.objects.filter(pk__in=[one.pk for one in some]).update(is_counted=True)
        done += len(some)
    return done
