"""Render the page of the scheduler's queue: everybody's pending and running jobs, including Vigil's."""

from __future__ import annotations

from datetime import datetime

from django.contrib.auth.decorators import login_required
from django.http import HttpRequest, HttpResponse, QueryDict
from django.shortcuts import render
from django.utils import timezone
from django.views.decorators.http import require_safe

from console.pages.freshness import stale_text
from console.pages.requests import is_fragment, vary_on_fragment
from jobs.listing import visibility
from jobs.listing.queue import STATES, QueueEntry, QueueSearch, describe_rows, unseen_jobs
from nodes.cluster import sync
from nodes.models import License, QueuedJob, Reading
from portal.access import user_of
from portal.http.paging import BadCursor
from portal.models import User
from vigil_core import formatting
from vigil_core.untrusted import plain

ROWS = 50
TABS = (("", "All"), ("pending", "Pending"), ("running", "Running"))


@login_required
@require_safe
def index(request: HttpRequest) -> HttpResponse:
    user, now = user_of(request), timezone.now()
    search = search_of(request.GET)
    try:
        page = search.page(user, cursor=request.GET.get("after") or None, limit=ROWS)
    except BadCursor:
        page = search.page(user, limit=ROWS)
    counts, read = search.counts(user), sync.readings()[Reading.Part.QUEUE].read_at
    state = request.GET.get("state", "")
    context = {
        "section": "queue",
        "entries": describe_rows(user, page.items),
        "next": page.next,
        "search": search,
        "tabs": [
            {"state": value, "title": title, "count": _count(counts, value), "current": value == state}
            for value, title in _tabs(state)
        ],
        "found": search.rows(user),
        "filtered": any(request.GET.get(name) for name in ("q", "state", "partition", "user", "mine")),
        "partitions": sorted({name for row in _partitions() for name in row.split(",") if name}),
        "licenses": list(License.objects.all()),
        "stale": stale_text(Reading.Part.QUEUE, now),
        "headline": headline(user, read),
        "fragment": is_fragment(request),
        "read": read,
    }
    return vary_on_fragment(
        render(request, "nodes/_queue.html" if is_fragment(request) else "nodes/queue.html", context)
    )


def search_of(params: QueryDict) -> QueueSearch:
    """Parse the search from the URL; unknown values are ignored."""
    return QueueSearch(
        text=plain(params.get("q", ""))[:200],
        states=[state for state in params.getlist("state") if state in STATES],
        partition=plain(params.get("partition", "")),
        user=plain(params.get("user", "")),
        mine=params.get("mine") == "1",
    )


def headline(user: User, read: datetime | None) -> tuple[str, str]:
    """Return the page's lead: the person's own jobs, then everybody's, then what the queue does not show yet."""
    rows = visibility.visible_queue(user)
    counts, new = QueueSearch().counts(user), unseen_jobs(user).text
    waiting, running = counts.get("pending", 0), counts.get("running", 0)
    everything = f"{formatting.plural(waiting, 'job')} pending and {formatting.count(running)} running in total."
    if read is None:
        return "The queue has not been polled yet.", new
    if not waiting and not running:
        return ("The queue was empty at the last poll.", new) if new else ("The queue is empty.", "")
    next_job = next(iter(_next_pending(user)), None)
    if next_job is None:
        active = rows.filter(visibility.submitted_by(user)).exclude(state="pending").count()
        if not active:
            return everything, new or "None is yours."
        return (
            f"{formatting.plural(active, 'job')} of yours {'is' if active == 1 else 'are'} running.",
            f"{everything} {new}".strip(),
        )
    many = next_job.row.tasks
    who = (
        f"Your {next_job.name} is pending"
        if many == 1
        else f"{formatting.plural(many, 'job')} of your {next_job.name} are pending"
    )
    place = "held"
    if next_job.position:
        place = f"position {formatting.count(next_job.position)} of {formatting.count(next_job.of)}"
    if many > 1 and next_job.position:
        place = f"from {place}"
    starts = f", expected to start at {formatting.clock(next_job.row.starts_at)}" if next_job.row.starts_at else ""
    return f"{who}, {place} in {next_job.row.partition or 'the queue'}{starts}.", f"{everything} {new}".strip()


def _next_pending(user: User) -> list[QueueEntry]:
    rows = QueuedJob.objects.filter(visibility.submitted_by(user), state="pending").order_by("-priority", "id")[:1]
    return describe_rows(user, list(rows))


def _count(counts: dict[str, int], state: str) -> int:
    return counts.get(state, 0) if state else sum(counts.values())


def _tabs(state: str) -> list[tuple[str, str]]:
    """Return the usual states; a rarer one that was chosen gets an additional tab."""
    is_usual = state in dict(TABS) or state not in STATES
    return list(TABS) if is_usual else [*TABS, (state, formatting.word(state).capitalize())]


def _partitions() -> list[str]:
    return list(QueuedJob.objects.order_by().values_list("partition", flat=True).distinct())
