"""Render the page of waste: GPU-hours allocated, used and idle, and who has idle GPUs now."""

from __future__ import annotations

from django.contrib.auth.decorators import login_required
from django.http import HttpRequest, HttpResponse, QueryDict
from django.shortcuts import render
from django.utils import timezone
from django.views.decorators.http import require_safe

from jobs.waste import report, sentences
from jobs.waste.report import GROUPINGS, SORTS, WINDOWS, WasteFilter
from portal.access import user_of
from vigil_core import formatting
from vigil_core.untrusted import whole

ROWS = 50
COLUMNS = (("allocated", "Allocated"), ("used", "Used"), ("share", "Used share"), ("idle", "Idle"))
HEADS = {"project": "Project", "person": "Person", "job": "Job"}


@login_required
@require_safe
def page(request: HttpRequest) -> HttpResponse:
    user, now, filters = user_of(request), timezone.now(), filters_of(request.GET)
    skip = whole(request.GET.get("after"), 2**31) or 0
    found = report.find(user, filters, now, limit=ROWS, skip=skip)
    idle = report.idle_now(user, now)
    context = {
        "section": "cluster",
        "place": "waste",
        "filters": filters,
        "since": filters.since(now),
        "lines": [(row, sentences.cells(row.hours)) for row in found.rows],
        "headline": sentences.summary(found, filters, sum(len(job.idle) for job, _ in idle)),
        "idle": idle,
        "windows": [(days, "Today" if days == 1 else formatting.plural(days, "day")) for days in WINDOWS],
        "groups": [(by, HEADS[by]) for by in GROUPINGS],
        "columns": [_column(filters, "name", HEADS[filters.by]), *(_column(filters, *column) for column in COLUMNS)],
        "next": None if found.is_last else skip + ROWS,
        "is_first": not skip,
        "csv": f"days={filters.days}&by={filters.by}&sort={filters.sort}",
    }
    return render(request, "portal/waste.html", context)


def filters_of(params: QueryDict) -> WasteFilter:
    """Parse the request from the URL; unknown values are ignored."""
    days, by, sort = whole(params.get("days"), 1000), params.get("by", ""), report.current_sort(params.get("sort", ""))
    return WasteFilter(
        days=days if days in WINDOWS else 7,
        by=by if by in GROUPINGS else "project",
        sort=sort if sort.removeprefix("-") in SORTS else "-idle",
    )


def _column(filters: WasteFilter, key: str, title: str) -> dict[str, str]:
    """Return a heading that sorts by its column: largest first, or names from a; again to reverse."""
    first, other = (key, f"-{key}") if key == "name" else (f"-{key}", key)
    direction = ("descending" if filters.is_falling else "ascending") if filters.key == key else ""
    return {"key": key, "title": title, "sort": other if filters.sort == first else first, "direction": direction}
