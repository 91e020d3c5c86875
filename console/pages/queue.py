"""The page of the scheduler's queue: everybody's jobs that wait or run, Vigil's own among them."""

from __future__ import annotations

from datetime import datetime

from django.contrib.auth.decorators import login_required
from django.http import HttpRequest, HttpResponse, QueryDict
from django.shortcuts import render
from django.utils import timezone
from django.views.decorators.http import require_safe

from console.pages.cluster import is_fragment, stale, varied
from jobs.listing import visibility
from jobs.listing.queue import STATES, Entry, QueueSearch, described, unseen
from nodes.cluster import sync
from nodes.models import License, QueuedJob, Reading
from portal.access import user_of
from portal.http.paging import BadCursor
from portal.models import User
from vigil_core import formatting
from vigil_core.untrusted import plain

ROWS = 50
TABS = (("", "All"), ("pending", "Waiting"), ("running", "Running"))


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
        "entries": described(user, page.items),
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
        "stale": stale(Reading.Part.QUEUE, now),
        "say": say(user, read),
        "fragment": is_fragment(request),
        "read": read,
    }
    return varied(render(request, "nodes/_queue.html" if is_fragment(request) else "nodes/queue.html", context))


def search_of(params: QueryDict) -> QueueSearch:
    """What the address asks for; what it does not understand, it leaves out."""
    return QueueSearch(
        text=plain(params.get("q", ""))[:200],
        states=[state for state in params.getlist("state") if state in STATES],
        partition=plain(params.get("partition", "")),
        user=plain(params.get("user", "")),
        mine=params.get("mine") == "1",
    )


def say(user: User, read: datetime | None) -> tuple[str, str]:
    """The sentence that leads the page: how the person's own stand, then everybody's, then what it does not show."""
    rows = visibility.visible_queue(user)
    counts, new = QueueSearch().counts(user), unseen(user).text
    waiting, running = counts.get("pending", 0), counts.get("running", 0)
    everything = (
        f"{formatting.plural(waiting, 'job waits', 'jobs wait')} in all, {formatting.plural(running, 'runs', 'run')}."
    )
    if read is None:
        return "The queue has not been read yet.", new
    if not waiting and not running:
        return ("The queue was empty when it was read.", new) if new else ("Nothing waits and nothing runs.", "")
    next_one = next(iter(_own_waiting(user)), None)
    if next_one is None:
        own = rows.filter(visibility.mine(user)).exclude(state="pending").count()
        if not own:
            return everything, new or "None of them is yours."
        return (
            f"{formatting.plural(own, 'job')} of yours {'runs' if own == 1 else 'run'}.",
            f"{everything} {new}".strip(),
        )
    many = next_one.row.tasks
    who = (
        f"Your {next_one.name} waits" if many == 1 else f"{formatting.plural(many, 'job')} of your {next_one.name} wait"
    )
    place = f"{formatting.count(next_one.position)} of {formatting.count(next_one.of)}" if next_one.position else "held"
    if many > 1 and next_one.position:
        place = f"from place {place}"
    starts = f", starts about {formatting.clock(next_one.row.starts_at)}" if next_one.row.starts_at else ""
    return f"{who}, {place} in {next_one.row.partition or 'the queue'}{starts}.", f"{everything} {new}".strip()


def _own_waiting(user: User) -> list[Entry]:
    rows = QueuedJob.objects.filter(visibility.mine(user), state="pending").order_by("-priority", "id")[:1]
    return described(user, list(rows))


def _count(counts: dict[str, int], state: str) -> int:
    return counts.get(state, 0) if state else sum(counts.values())


def _tabs(state: str) -> list[tuple[str, str]]:
    """The usual states; a rarer one that was chosen is a tab of its own."""
    known = state in dict(TABS) or state not in STATES
    return list(TABS) if known else [*TABS, (state, formatting.word(state).capitalize())]


def _partitions() -> list[str]:
    return list(QueuedJob.objects.order_by().values_list("partition", flat=True).distinct())
