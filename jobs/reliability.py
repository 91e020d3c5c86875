"""How often what Vigil runs here is lost without a warning, told from the attempts of the last weeks."""

from __future__ import annotations

from collections import Counter
from datetime import timedelta

from django.db.models import QuerySet
from django.utils import timezone

from jobs.models import Attempt, Event, Job

DAYS = 30
MOST_ATTEMPTS = 5_000
PRIOR_HOURS = 24.0
"""One failure in so many node-hours is what is assumed where nothing has been seen; it counts as if it had been."""
LOST = ("node_fail", "lost", "hang", "forgotten")
"""Causes of an end that left no time to save."""


def hours_between_failures(nodes: int) -> float | None:
    """Mean time between failures of a job on so many nodes, hours; None while less is known than is assumed.

    Failures are attempts that ended so, and restarts of ranks within one, unless they were to take in more nodes;
    hours are those that its nodes were held.
    """
    now = timezone.now()
    recent = Attempt.objects.filter(started_at__gt=now - timedelta(days=DAYS)).exclude(job__kind=Job.ATTACHED)
    grown = _grown(recent)
    # The newest by start: by number, databases would look for recent ones among all there ever were.
    rows = recent.order_by("-started_at").values_list("pk", "started_at", "ended_at", "nodes", "cause", "incarnation")
    hours, failures = 0.0, 0
    for pk, started, ended, held, cause, restarts in rows[:MOST_ATTEMPTS].iterator():
        hours += ((ended or now) - (started or now)).total_seconds() / 3600 * max(1, len(held))
        failures += max(0, restarts - grown[pk]) + (cause in LOST)
    if hours < PRIOR_HOURS:
        return None
    return (hours + PRIOR_HOURS) / (failures + 1) / max(1, nodes)


def _grown(attempts: QuerySet[Attempt]) -> Counter[int]:
    """How many of an attempt's restarts were asked for by its launcher, to take in nodes that stood by."""
    restarted = attempts.filter(incarnation__gt=0)
    told = Event.objects.filter(attempt__in=restarted, kind="incarnation.ended", data__why="joined")
    return Counter(told.order_by().values_list("attempt_id", flat=True))
