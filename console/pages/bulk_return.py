"""Render /drains/return: which drains a return of many nodes would end, and the orders."""

from __future__ import annotations

from django.contrib import messages
from django.contrib.auth.decorators import login_required
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.views.decorators.http import require_http_methods

from console.pages.cluster import sysadmin_of
from nodes.cluster import drain as orders
from nodes.drains import bulk, bulk_return, host_expression
from nodes.drains.bulk_return import ReturnPreview
from nodes.drains.host_expression import BadHostExpression
from portal.models import User
from vigil_core import formatting
from vigil_core.untrusted import plain


@login_required
@require_http_methods(["GET", "HEAD", "POST"])
def page(request: HttpRequest) -> HttpResponse:
    user = sysadmin_of(request, "return nodes to service")
    sent = request.POST if request.method == "POST" else request.GET
    expression = plain(sent.get("nodes", "")).strip()[: host_expression.MOST_LETTERS + 1]
    reason = " ".join(plain(sent.get("reason", "")).split())
    mistake, found = "", None
    if expression:
        try:
            found = bulk_return.preview(user, expression)
        except (BadHostExpression, bulk.UnknownNodes) as error:
            mistake = str(error)
    if request.method == "POST" and found is not None:
        if reason and len(reason) <= orders.MOST_REASON:
            return _undrain(request, user, expression, reason)
        messages.error(request, f"Enter a reason of at most {orders.MOST_REASON} characters.")
    context = {
        "section": "cluster",
        "place": "drains",
        "expression": expression,
        "mistake": mistake,
        "found": found,
        "groups": [("Your drains", found.own), ("Drained by others", found.by_others)] if found else [],
        "headline": headline(found) if found is not None else None,
        "most_reason": orders.MOST_REASON,
        "most_letters": host_expression.MOST_LETTERS,
        "most_nodes": host_expression.MOST_NODES,
    }
    return render(request, "nodes/bulk_return.html", context, status=400 if request.method == "POST" else 200)


def _undrain(request: HttpRequest, user: User, expression: str, reason: str) -> HttpResponse:
    outcomes = bulk_return.return_all(user, expression, reason, replace=bool(request.POST.get("replace")))
    ordered = sum(outcome.order is not None for outcome in outcomes)
    messages.success(request, f"Ordered to undrain {formatting.plural(ordered, 'node')}.")
    return redirect("drains")


def headline(found: ReturnPreview) -> tuple[str, str]:
    """Return the page's lead: how many nodes return; then how many stay as they are."""
    if not found.own and not found.by_others:
        return "All of these nodes are in service.", ""
    lead = f"This returns {formatting.plural(len(found.own), 'node')} to service." if found.own else ""
    stays = "stays as it is" if len(found.by_others) == 1 else "stay as they are"
    others = f"{formatting.plural(len(found.by_others), 'node')} that somebody else drained {stays}."
    if not found.by_others:
        return lead, ""
    return (lead, others) if lead else (others, "")
