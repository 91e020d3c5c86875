"""Query the layouts that a job's attempts trained with, as reported by rank 0."""

from __future__ import annotations

from collections.abc import Iterable

from jobs.models import Attempt, Event
from jobs.presenting.job_page.layouts import ChosenLayout, layout


def chosen_layouts(attempts: Iterable[Attempt]) -> dict[int, ChosenLayout]:
    """Return each attempt's layout; the newest if ranks restarted, since fewer nodes may need another layout."""
    rows = Event.objects.filter(attempt__in=list(attempts), kind="plan.chosen", rank=0).order_by("incarnation", "id")
    return {attempt: layout(data) for attempt, data in rows.values_list("attempt_id", "data")}
