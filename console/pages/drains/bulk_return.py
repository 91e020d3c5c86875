"""Render /drains/return: which drains a return of many nodes would end, and the orders."""

from __future__ import annotations

from functools import partial

from django.contrib.auth.decorators import login_required
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.views.decorators.http import require_http_methods

from console.pages.drains.bulk_form import BulkForm, show_outcomes
from nodes.drains import bulk_return
from nodes.drains.bulk_return import ReturnPreview
from portal.access import sysadmin_of
from portal.models import User
from vigil_core import formatting


@login_required
@require_http_methods(["GET", "HEAD", "POST"])
def page(request: HttpRequest) -> HttpResponse:
    user = sysadmin_of(request, "undrain nodes")
    form = BulkForm.read(request, partial(bulk_return.preview, user))
    if form.may_order(request):
        return _undrain(request, user, form)
    found = form.found
    context = form.context() | {
        "groups": [("Your drains", found.yours), ("Drained by others", found.by_others)] if found else [],
        "headline": headline(found) if found is not None else None,
    }
    return render(request, "nodes/bulk_return.html", context, status=422 if request.method == "POST" else 200)


def _undrain(request: HttpRequest, user: User, form: BulkForm[ReturnPreview]) -> HttpResponse:
    outcomes = bulk_return.return_all(user, form.expression, form.reason, replaces=form.replaces(request))
    show_outcomes(request, "undrain", outcomes)
    return redirect("drains")


def headline(found: ReturnPreview) -> tuple[str, str]:
    """Return the page's lead: how many nodes it undrains; then how many stay as they are."""
    if not found.yours and not found.by_others:
        return "All of these nodes are in service.", ""
    lead = f"This undrains {formatting.plural(len(found.yours), 'node')}." if found.yours else ""
    stays = "stays as it is" if len(found.by_others) == 1 else "stay as they are"
    others = f"{formatting.plural(len(found.by_others), 'node')} that somebody else drained {stays}."
    if not found.by_others:
        return lead, ""
    return (lead, others) if lead else (others, "")
