"""The list of jobs. Filters, search, order and page are all in the address."""

from __future__ import annotations

from typing import Any

from django.contrib.auth.decorators import login_required
from django.http import HttpRequest, HttpResponse, QueryDict
from django.shortcuts import get_object_or_404, render
from django.utils import timezone
from django.views.decorators.http import require_safe

from jobs.gathering.job_row import JobRow
from jobs.listing.criteria import DEFAULT_SORT, STATE_GROUPS, STATE_WORDS
from jobs.listing.finder import Count
from jobs.listing.jobs import SORTS, JobSearch
from jobs.models import Attempt, Job
from jobs.views.spans import SPANS, since
from portal.access import user_of
from portal.http.paging import BadCursor
from portal.models import Project, User
from vigil_core import kinds
from vigil_core.untrusted import plain, whole

ROWS = 50
TABS = (("", "All"), ("running", "Running"), ("pending", "Pending"), ("bad", "Failed"), ("completed", "Completed"))
KINDS = tuple(kind.name for kind in kinds.ALL)


@login_required
@require_safe
def index(request: HttpRequest) -> HttpResponse:
    """Show the whole page, or for htmx its table and tabs."""
    user = user_of(request)
    search = search_of(request.GET, user)
    finder = search.finder(user)
    try:
        page = search.page(user, cursor=request.GET.get("after") or None, limit=ROWS, finder=finder)
    except BadCursor:
        page = search.page(user, limit=ROWS, finder=finder)
    counts = finder.counts()
    now = timezone.now()
    context: dict[str, Any] = {
        "section": "jobs",
        "rows": [JobRow(job, now) for job in page.items],
        "next": page.next,
        "search": search,
        "tabs": _tabs(counts, request.GET.get("state", "")),
        "has_project": lambda: user.is_sysadmin or user.memberships.exists(),
        "total": sum(counts.values(), Count(0)),
        "found": _count(counts, search.states),
        "active": sum((counts[state] for state in Attempt.ALIVE if state in counts), Count(0)),
        "filtered": any(
            request.GET.get(name) for name in ("q", "state", "project", "owner", "kind", "tag", "since", "sweep")
        ),
        "spans": SPANS,
        "span": request.GET.get("since", ""),
        "kinds": KINDS,
        "states": STATE_WORDS,
    }
    if request.headers.get("HX-Target") == "results":
        return _vary_on_fragment(render(request, "jobs/_results.html", context | {"fragment": True}))
    context["projects"] = Project.objects.visible_to(user).values_list("slug", flat=True)
    return _vary_on_fragment(render(request, "jobs/index.html", context))


@login_required
@require_safe
def row(request: HttpRequest, job_id: int) -> HttpResponse:
    """Render one row again after its job changed state."""
    jobs = Job.objects.visible_to(user_of(request)).with_latest_attempt()
    job = get_object_or_404(jobs, pk=job_id)
    return render(request, "jobs/_row.html", {"row": JobRow(job, timezone.now())})


def search_of(params: QueryDict, user: User) -> JobSearch:
    """Return the search that the address describes; invalid parameters are ignored."""
    sort = params.get("sort", DEFAULT_SORT)
    owner = plain(params.get("owner", ""))
    return JobSearch(
        text=plain(params.get("q", ""))[:200],
        states=[state for state in params.getlist("state") if state in STATE_WORDS],
        projects=[plain(slug) for slug in params.getlist("project") if slug],
        owner=user.username if owner == "me" else owner,
        kind=plain(params.get("kind", "")),
        tags=[plain(tag) for tag in params.getlist("tag") if tag],
        created_after=since(params.get("since", "")),
        sweep=whole(params.get("sweep", "")),
        sort=sort if sort in SORTS else DEFAULT_SORT,
    )


def _count(counts: dict[str, Count], states: list[str]) -> Count:
    if not states:
        return sum(counts.values(), Count(0))
    wanted: set[str] = set()
    for state in states:
        wanted |= STATE_GROUPS.get(state, frozenset({state}))
    return sum((count for state, count in counts.items() if state in wanted), Count(0))


def _tabs(counts: dict[str, Count], chosen: str) -> list[dict[str, object]]:
    """Return tabs of the usual states with counts, and one for a rarer state if it is selected."""
    tabs = list(TABS)
    if chosen and chosen not in dict(TABS):
        tabs.append((chosen, chosen.replace("_", " ").capitalize()))
    return [
        {"state": state, "title": title, "count": _count(counts, [state] if state else []), "current": state == chosen}
        for state, title in tabs
    ]


def _vary_on_fragment(response: HttpResponse) -> HttpResponse:
    """Keep caches from mixing up page and fragment, which share an address."""
    response.headers["Vary"] = "HX-Request, HX-Target, Cookie"
    return response
