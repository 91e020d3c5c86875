"""The layouts that the attempts of a job trained on, as their rank 0 told."""

from __future__ import annotations

from collections.abc import Iterable

from jobs.models import Attempt, Event
from jobs.presenting.layouts import Layout, layout


def chosen(attempts: Iterable[Attempt]) -> dict[int, Layout]:
    """Each attempt's layout; the newest where its ranks were started several times, as fewer nodes may need another."""
    rows = Event.objects.filter(attempt__in=list(attempts), kind="plan.chosen", rank=0).order_by("incarnation", "id")
    return {attempt: layout(data) for attempt, data in rows.values_list("attempt_id", "data")}
