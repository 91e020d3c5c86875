"""The page of reliability: how often nodes and programs fail, what it costs, and a forecast for a future run."""

from __future__ import annotations

from urllib.parse import urlencode

from django.contrib.auth.decorators import login_required
from django.http import HttpRequest, HttpResponse, QueryDict
from django.shortcuts import render
from django.utils import timezone
from django.views.decorators.http import require_safe

from jobs.failures import drawing, forecasting, reading, saying
from jobs.failures.counted import KINDS
from jobs.failures.reading import BY, WINDOWS, Row, Wanted
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
    user, now, wanted = user_of(request), timezone.now(), wanted_of(request.GET)
    found = reading.find(user, wanted, now)
    forecast = forecasting.of_page(request.GET, found)
    skip = whole(request.GET.get("after"), 2**31) or 0
    rows = found.rows if wanted.by != "week" else found.rows[::-1]
    context = {
        "section": "cluster",
        "place": "reliability",
        "wanted": wanted,
        "since": wanted.since(now),
        "found": found,
        "say": saying.say(found, wanted),
        "lines": [_line(row, wanted) for row in rows[skip : skip + ROWS]],
        "head": HEADS[wanted.by],
        "windows": [(days, formatting.plural(days, "day")) for days in WINDOWS],
        "kinds": [(kind, TITLES[kind]) for kind in KINDS],
        "groups": [(by, HEADS[by]) for by in BY],
        "next": skip + ROWS if len(rows) > skip + ROWS else None,
        "is_first": not skip,
        "weeks": drawing.weeks(found.weeks),
        "forecast": forecast,
        "expects": saying.expect(forecast),
        "curve": drawing.curve(forecast),
        "published": PUBLISHED,
        "csv": urlencode({"days": wanted.days, "by": wanted.by, "kind": wanted.kind, "project": wanted.project}),
        "mttf": saying.mttf(found.total.rate),
        "rate": saying.per_thousand(found.total.rate),
        "lost": saying.lost(found.total.lost_gpu_hours),
        "offenders": found.offenders[:ROWS],
    }
    return render(request, "portal/reliability.html", context)


def wanted_of(params: QueryDict) -> Wanted:
    """Parse the request from the URL; unknown values are ignored."""
    days, by, kind = whole(params.get("days"), 1000), params.get("by", ""), params.get("kind", "")
    return Wanted(
        days=days if days in WINDOWS else 30,
        by=by if by in BY else "cause",
        kind=kind if kind in KINDS else "all",
        project=plain(params.get("project", ""))[:64],
    )


def _line(row: Row, wanted: Wanted) -> dict[str, object]:
    """A row's cells."""
    return {
        "row": row,
        "name": f"{formatting.NBSP}".join((f"{row.since.day}", f"{row.since:%b}")) if row.since else row.name,
        "rate": saying.per_thousand(row.rate),
        "mttf": saying.mttf(row.rate),
        "is_code": wanted.by == "cause",
    }
