"""A sweep's page: its jobs by their values, the best setting, and all losses in one drawing."""

from __future__ import annotations

from django.contrib import messages
from django.contrib.auth.decorators import login_required
from django.http import HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, redirect, render
from django.views.decorators.http import require_POST, require_safe

from jobs.errors import JobError
from jobs.gathering.sweep_page import sweep_page
from jobs.models import Sweep
from jobs.submitting import sweeps
from portal.access import can, user_of
from vigil_core import formatting


@login_required
@require_safe
def page(request: HttpRequest, sweep_id: int) -> HttpResponse:
    """Show the whole page, or for htmx the part that changes."""
    user = user_of(request)
    sweep = get_object_or_404(Sweep.objects.visible_to(user).select_related("project", "owner"), pk=sweep_id)
    shown = sweep_page(sweep, request.GET.get("sort", ""), show_all=bool(request.GET.get("all")))
    context = {"section": "jobs", "sweep": sweep, "page": shown, "may_change": can(user, "change", sweep)}
    is_part = request.headers.get("HX-Target") == "sweep"
    response = render(request, "jobs/_sweep.html" if is_part else "jobs/sweep.html", context)
    response.headers["Vary"] = "HX-Target, Cookie"
    return response


@login_required
@require_POST
def cancel(request: HttpRequest, sweep_id: int) -> HttpResponse:
    user = user_of(request)
    sweep = get_object_or_404(Sweep.objects.visible_to(user).select_related("project", "owner"), pk=sweep_id)
    try:
        done = sweeps.cancel(user, sweep)
    except JobError as error:
        messages.error(request, str(error))
    else:
        messages.success(
            request, f"Cancelling {formatting.plural(done, 'job')}. The ranks save a last checkpoint and stop."
        )
    return redirect("sweep", sweep_id=sweep.pk)
