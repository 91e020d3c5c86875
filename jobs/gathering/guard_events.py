"""Query the warnings of a job's attempts; jobs.presenting has the words."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from django.db.models import Count, F, Max, Q, Window
from django.db.models.functions import RowNumber

from jobs.models import Attempt, Event
from jobs.presenting.job_page.guard_events import KINDS, NOT_SAVED, GuardEvent, describe_event

MAX_SHOWN = 5
"""Number of events of one kind shown per attempt; the others are only counted."""
MAX_NEWEST = 3


def newest(attempt: Attempt) -> tuple[list[GuardEvent], bool]:
    """Return the newest few warnings of one attempt, newest first, and whether there are more."""
    # Not by a plain column: SQLite would then read all events of an attempt in its order, instead of these kinds.
    last = Event.objects.filter(_shown_events(), attempt=attempt).order_by((F("id") + 0).desc())[: MAX_NEWEST + 1]
    unit = attempt.job.job_kind.unit
    found = [(at, describe_event(kind, data, unit)) for kind, at, data in last.values_list("kind", "time", "data")]
    return found[:MAX_NEWEST], len(found) > MAX_NEWEST


def by_attempt(attempts: Iterable[Attempt]) -> dict[int, list[GuardEvent]]:
    """Return the warnings of these attempts by attempt id, in chronological order."""
    units = {attempt.pk: attempt.job.job_kind.unit for attempt in attempts}
    events = Event.objects.filter(_shown_events(), attempt__in=list(units)).order_by("id")
    events_by_attempt: dict[int, list[GuardEvent]] = defaultdict(list)
    place = Window(RowNumber(), partition_by=[F("attempt_id"), F("kind")], order_by=F("id").asc())
    first = events.annotate(place=place).filter(place__lte=MAX_SHOWN)
    for attempt_id, kind, at, data in first.values_list("attempt_id", "kind", "time", "data"):
        events_by_attempt[attempt_id].append((at, describe_event(kind, data, units[attempt_id])))
    counted = events.order_by().values("attempt_id", "kind").annotate(count=Count("id"), last=Max("time"))
    for kinds in counted.filter(count__gt=MAX_SHOWN):
        events_by_attempt[kinds["attempt_id"]].append(
            (kinds["last"], f"and {kinds['count'] - MAX_SHOWN} more of this kind, the last")
        )
    return {attempt_id: sorted(events, key=lambda event: event[0]) for attempt_id, events in events_by_attempt.items()}


def _shown_events() -> Q:
    """Select the events that are warnings. A save skipped because the previous one was still running is not one."""
    return Q(kind__in=KINDS - {NOT_SAVED}) | Q(kind=NOT_SAVED, data__failed=True)
