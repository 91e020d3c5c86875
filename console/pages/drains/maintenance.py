"""Render /maintenance: planned maintenance of nodes, and the form that plans it."""

from __future__ import annotations

from datetime import datetime

from django.contrib import messages
from django.contrib.auth.decorators import login_required
from django.http import HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, redirect, render
from django.utils import timezone
from django.views.decorators.http import require_http_methods, require_POST

from console.pages import forms
from console.pages.freshness import scheduler_name
from nodes.cluster import sync
from nodes.drains import maintenance
from nodes.drains.bulk import UnknownNodes
from nodes.models import MaintenanceWindow
from portal.access import CLUSTER, can, sysadmin_of, user_of
from portal.models import User
from vigil_core import formatting, host_expression
from vigil_core.host_expression import BadHostExpression
from vigil_core.untrusted import plain

MAX_PAST = 20


@login_required
@require_http_methods(["GET", "HEAD", "POST"])
def index(request: HttpRequest) -> HttpResponse:
    mistake = mistake_field = ""
    if request.method == "POST":
        try:
            _plan(request, sysadmin_of(request, "plan maintenance"))
        except maintenance.BadWindow as error:
            mistake, mistake_field = str(error), error.field
        except (BadHostExpression, UnknownNodes) as error:
            mistake, mistake_field = str(error), "nodes"
        else:
            messages.success(request, "Planned.")
            return redirect("maintenance")
    unfinished = list(MaintenanceWindow.objects.unfinished().select_related("planned_by").order_by("starts_at"))
    context = {
        "section": "cluster",
        "place": "drains",
        "headline": headline(unfinished),
        "unfinished": unfinished,
        "past": MaintenanceWindow.objects.exclude(pk__in=[window.pk for window in unfinished])[:MAX_PAST],
        "may_change": can(user_of(request), "change", CLUSTER),
        "may_reserve": sync.capabilities().has_slurm_options,
        "scheduler": scheduler_name(),
        "most_reason": MaintenanceWindow.MAX_REASON,
        "most_characters": host_expression.MAX_CHARACTERS,
        "mistake": mistake,
        "mistake_field": mistake_field,
        "sent": request.POST,
        "zone": timezone.get_current_timezone_name(),
    }
    return render(request, "nodes/maintenance.html", context, status=422 if mistake else 200)


def _plan(request: HttpRequest, user: User) -> MaintenanceWindow:
    sent = {name: plain(request.POST.get(name, "")).strip() for name in ("nodes", "reason", "starts_at", "ends_at")}
    starts_at, ends_at = (_moment(sent[name], name) for name in ("starts_at", "ends_at"))
    wants_reservation = bool(request.POST.get("reserve"))
    return maintenance.plan(
        user, sent["nodes"], sent["reason"], starts_at, ends_at, wants_reservation=wants_reservation
    )


@login_required
@require_POST
def cancel(request: HttpRequest, window_id: int) -> HttpResponse:
    user = sysadmin_of(request, "cancel maintenance")
    window = get_object_or_404(MaintenanceWindow, pk=window_id)
    if not maintenance.cancel(user, window):
        messages.error(request, "This maintenance is over already.")
    return redirect("maintenance")


def headline(unfinished: list[MaintenanceWindow]) -> tuple[str, str]:
    """Return the page's lead: what is in maintenance now, then what comes next."""
    active = [window for window in unfinished if window.state == MaintenanceWindow.WindowState.ACTIVE]
    coming = [window for window in unfinished if window not in active]
    names = {name for window in active for name in window.nodes}
    rest = f"The next begins {formatting.clock(coming[0].starts_at)}." if coming else ""
    if names:
        return f"{formatting.plural(len(names), 'node')} in maintenance.", rest
    if coming:
        return f"{formatting.plural(len(coming), 'maintenance window')} planned.", rest
    return "No maintenance is planned.", ""


def _moment(text: str, field: str) -> datetime:
    """Return a time as a browser sends it, in the site's time zone."""
    try:
        return forms.moment(text)
    except ValueError:
        raise maintenance.BadWindow(field, "Enter both times, as in 2026-12-01T08:00.") from None
