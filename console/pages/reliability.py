"""Render the page of reliability: how often nodes and programs fail, what it costs, and a forecast for a future run."""

from __future__ import annotations

from urllib.parse import urlencode

from django.contrib.auth.decorators import login_required
from django.http import HttpRequest, HttpResponse, QueryDict
from django.shortcuts import render
from django.utils import timezone
from django.views.decorators.http import require_safe

from jobs.failures import charts, forecasting, report, sentences
from jobs.failures.kinds import KINDS
from jobs.failures.report import GROUPINGS, WINDOWS, FailureFilter, FailureRow
from jobs.reliability.published import PUBLISHED
from portal.access import user_of
from vigil_core import formatting
from vigil_core.untrusted import plain, whole

ROWS = 50
HEADS = {
    "cause": "Cause", "node": "Node", "rack": "Rack", "partition": "Partition", "project": "Project", "week": "Week",
}  # fmt: skip
TITLES = {"all": "All failures", "machines": "Hardware", "programs": "Programs"}


@login_required
@require_safe
def page(request: HttpRequest) -> HttpResponse:
    user, now, filters = user_of(request), timezone.now(), filters_of(request.GET)
    found = report.find(user, filters, now)
    forecast = forecasting.from_form(request.GET, found)
    skip = whole(request.GET.get("after"), 2**31) or 0
    rows = found.rows if filters.by != "week" else found.rows[::-1]
    context = {
        "section": "cluster",
        "place": "reliability",
        "filters": filters,
        "since": filters.since(now),
        "found": found,
        "headline": sentences.summary(found, filters),
        "lines": [_line(row, filters) for row in rows[skip : skip + ROWS]],
        "head": HEADS[filters.by],
        "windows": [(days, formatting.plural(days, "day")) for days in WINDOWS],
        "kinds": [(kind, TITLES[kind]) for kind in KINDS],
        "groups": [(by, HEADS[by]) for by in GROUPINGS],
        "next": skip + ROWS if len(rows) > skip + ROWS else None,
        "is_first": not skip,
        "weeks": charts.weeks(found.weeks),
        "forecast": forecast,
        "expects": sentences.forecast_text(forecast),
        "curve": charts.curve(forecast),
        "published": PUBLISHED,
        "csv": urlencode({"days": filters.days, "by": filters.by, "kind": filters.kind, "project": filters.project}),
        "mtbf": sentences.mtbf(found.total.rate),
        "rate": sentences.per_thousand(found.total.rate),
        "lost": sentences.lost(found.total.lost_gpu_hours),
        "offenders": found.offenders[:ROWS],
    }
    return render(request, "portal/reliability.html", context)


def filters_of(params: QueryDict) -> FailureFilter:
    """Parse the request from the URL; unknown values are ignored."""
    days, by, kind = whole(params.get("days"), 1000), params.get("by", ""), params.get("kind", "")
    return FailureFilter(
        days=days if days in WINDOWS else 30,
        by=by if by in GROUPINGS else "cause",
        kind=kind if kind in KINDS else "all",
        project=plain(params.get("project", ""))[:64],
    )


def _line(row: FailureRow, filters: FailureFilter) -> dict[str, object]:
    """Return a row's cells."""
    return {
        "row": row,
        "name": f"{formatting.NBSP}".join((f"{row.since.day}", f"{row.since:%b}")) if row.since else row.name,
        "rate": sentences.per_thousand(row.rate),
        "mtbf": sentences.mtbf(row.rate),
        "is_code": filters.by == "cause",
    }
