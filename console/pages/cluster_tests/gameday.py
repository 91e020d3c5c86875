"""Render /gameday: a form that starts one, the results of the newest or chosen one, and the list of earlier ones."""

from __future__ import annotations

from typing import Any

from django.contrib import messages
from django.contrib.auth.decorators import login_required
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.views.decorators.http import require_http_methods, require_POST, require_safe

from console.pages.requests import is_fragment, vary_on_fragment
from jobs.errors import Conflict
from jobs.gameday import start as game_days
from jobs.gameday.report import drill_reports, upgrades_since
from jobs.models import GameDay
from nodes.models import Partition
from portal.access import can, sysadmin_of
from portal.http.paging import SortOrder, page_or_first
from portal.models import Project, User
from vigil_core.untrusted import plain

PER_PAGE = 20
MAX_CHOICES = 200
GLYPHS = {
    "passed": "completed", "failed": "failed", "running": "running", "waiting": "pending", "not tried": "cancelled",
}  # fmt: skip


@login_required
@require_safe
def index(request: HttpRequest, game_day_id: int | None = None) -> HttpResponse:
    return _page(request, sysadmin_of(request, "see game days"), game_day_id)


@login_required
@require_http_methods(["GET", "HEAD", "POST"])
def start(request: HttpRequest) -> HttpResponse:
    """Start a game day. A form with a mistake is shown again."""
    user = sysadmin_of(request, "start game days")
    if request.method != "POST":  # the page of a refused form refreshes itself, and may be loaded again
        return redirect("game_days")
    project, partition = (plain(request.POST.get(name, ""))[:255] for name in ("project", "partition"))
    try:
        started = game_days.start(user, project, partition)
    except (game_days.InvalidGameDay, Conflict) as error:
        status = 409 if isinstance(error, Conflict) else 422
        return _page(request, user, sent=(project, partition), mistake=str(error), status=status)
    return redirect("game_day", started.pk)


def _page(
    request: HttpRequest, user: User, game_day_id: int | None = None, *,
    sent: tuple[str, str] | None = None, mistake: str = "", status: int = 200,
) -> HttpResponse:  # fmt: skip
    """Return the page of the chosen game day, or of the newest. `sent`: the project and partition of a refused form."""
    rows = GameDay.objects.select_related("started_by", "project")
    newest_first = SortOrder("id", descending=True)
    found = page_or_first(
        rows.prefetch_related("drills"), newest_first, cursor=request.GET.get("after"), limit=PER_PAGE
    )
    chosen = rows.first() if game_day_id is None else _game_day(game_day_id)
    reports = drill_reports(chosen) if chosen else []
    context: dict[str, Any] = {
        "section": "cluster",
        "place": "gameday",
        "chosen": chosen,
        "is_own_page": game_day_id is not None,  # elsewhere the newest is shown: another one at each refresh
        "reports": [(GLYPHS[report.drill.state], report) for report in reports],
        "upgrades": upgrades_since(chosen) if chosen and not chosen.is_active else [],
        "software": list(dict.fromkeys(report.software for report in reports if report.software)),
        "changes": list(dict.fromkeys(change for report in reports for change in report.changes)),
        "rows": found.items,
        "next": found.next,
    }
    if is_fragment(request):
        return vary_on_fragment(render(request, "nodes/_gameday.html", context))
    projects = Project.objects.visible_to(user).order_by("slug")[:MAX_CHOICES]
    context["projects"] = [project.slug for project in projects if can(user, "submit", project)]
    partitions = Partition.objects.reported().order_by("name")
    context["partitions"] = list(partitions.values_list("name", flat=True)[:MAX_CHOICES])
    context["project"], context["partition"] = sent or ((chosen.project.slug, chosen.partition) if chosen else ("", ""))
    context["mistake"] = mistake
    return vary_on_fragment(render(request, "nodes/gameday.html", context, status=status))


@login_required
@require_POST
def cancel(request: HttpRequest, game_day_id: int) -> HttpResponse:
    user = sysadmin_of(request, "cancel game days")
    try:
        game_days.cancel(user, _game_day(game_day_id))
    except Conflict as error:
        messages.error(request, str(error))
    return redirect("game_day", game_day_id)


def _game_day(game_day_id: int) -> GameDay:
    rows = GameDay.objects.select_related("started_by", "project").filter(pk=game_day_id)
    if (row := rows.first()) is None:
        raise Http404(f"There is no game day {game_day_id}.")
    return row
