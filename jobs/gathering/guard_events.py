"""What guards told of a job's attempts, from the database; jobs.presenting has the words."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from django.db.models import Count, F, Max, Q, Window
from django.db.models.functions import RowNumber

from jobs.models import Attempt, Event
from jobs.presenting.guard_events import KINDS, NOT_SAVED, GuardEvent, say

SHOWN = 5
"""How many events of one kind in one attempt are shown; the others are counted."""
SHOWN_NEWEST = 3


def newest(attempt: Attempt) -> tuple[list[GuardEvent], bool]:
    """The last few of one attempt, newest first, and whether there are more."""
    # By no plain column: in the order of one SQLite walks through all that an attempt has told, instead of these kinds.
    last = Event.objects.filter(_told(), attempt=attempt).order_by((F("id") + 0).desc())[: SHOWN_NEWEST + 1]
    counts = attempt.job.of_kind.counts
    found = [(at, say(kind, data, counts)) for kind, at, data in last.values_list("kind", "time", "data")]
    return found[:SHOWN_NEWEST], len(found) > SHOWN_NEWEST


def of(attempts: Iterable[Attempt]) -> dict[int, list[GuardEvent]]:
    """The guard events of these attempts, by attempt, in the order in which they happened."""
    counts = {attempt.pk: attempt.job.of_kind.counts for attempt in attempts}
    told = Event.objects.filter(_told(), attempt__in=list(counts)).order_by("id")
    found: dict[int, list[GuardEvent]] = defaultdict(list)
    place = Window(RowNumber(), partition_by=[F("attempt_id"), F("kind")], order_by=F("id").asc())
    first = told.annotate(place=place).filter(place__lte=SHOWN)
    for attempt_id, kind, at, data in first.values_list("attempt_id", "kind", "time", "data"):
        found[attempt_id].append((at, say(kind, data, counts[attempt_id])))
    counted = told.order_by().values("attempt_id", "kind").annotate(count=Count("id"), last=Max("time"))
    for kinds in counted.filter(count__gt=SHOWN):
        found[kinds["attempt_id"]].append((kinds["last"], f"and {kinds['count'] - SHOWN} more like it, the last"))
    return {attempt_id: sorted(events, key=lambda event: event[0]) for attempt_id, events in found.items()}


def _told() -> Q:
    """A save that was left out because the one before was still going on is none."""
    return Q(kind__in=KINDS - {NOT_SAVED}) | Q(kind=NOT_SAVED, data__failed=True)
