"""Render /drains/several: what a drain of many nodes would hit, and the orders."""

from __future__ import annotations

from django.contrib.auth.decorators import login_required
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.views.decorators.http import require_http_methods

from console.pages.drains.bulk_form import BulkForm, show_outcomes
from nodes.drains import bulk
from nodes.drains.bulk import DrainPreview
from portal.access import sysadmin_of
from portal.models import User
from vigil_core import formatting


@login_required
@require_http_methods(["GET", "HEAD", "POST"])
def page(request: HttpRequest) -> HttpResponse:
    user = sysadmin_of(request, "drain nodes")
    form = BulkForm.read(request, bulk.preview)
    if form.may_order(request):
        return _drain(request, user, form)
    context = form.context() | {
        "headline": headline(form.found) if form.found is not None else None,
    }
    return render(request, "nodes/bulk_drain.html", context, status=422 if request.method == "POST" else 200)


def _drain(request: HttpRequest, user: User, form: BulkForm[DrainPreview]) -> HttpResponse:
    outcomes = bulk.drain_all(user, form.expression, form.reason, replaces=form.replaces(request))
    show_outcomes(request, "drain", outcomes)
    return redirect("drains")


def headline(found: DrainPreview) -> tuple[str, str]:
    """Return the page's lead: how many nodes and what share of the GPUs; then whose jobs run there."""
    nodes = formatting.plural(len(found.nodes), "node")
    share = (
        f", {formatting.share(found.gpus / found.cluster_gpus)} of the GPUs in service" if found.cluster_gpus else ""
    )
    lead = f"This drains {nodes}{share}."
    if not found.jobs:
        return lead, "No job runs there."
    owners = formatting.listed(found.users, 4)
    runs = "runs" if found.jobs == 1 else "run"
    return lead, f"{formatting.plural(found.jobs, 'job')} of {owners} {runs} there and will continue."
