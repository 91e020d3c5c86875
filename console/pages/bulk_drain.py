"""Render /drains/several: what a drain of many nodes would hit, and the orders."""

from __future__ import annotations

from django.contrib import messages
from django.contrib.auth.decorators import login_required
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.views.decorators.http import require_http_methods

from console.pages.cluster import sysadmin_of
from nodes.cluster import drain as orders
from nodes.drains import bulk, host_expression
from nodes.drains.bulk import DrainPreview
from nodes.drains.host_expression import BadHostExpression
from portal.models import User
from vigil_core import formatting
from vigil_core.untrusted import plain


@login_required
@require_http_methods(["GET", "HEAD", "POST"])
def page(request: HttpRequest) -> HttpResponse:
    user = sysadmin_of(request, "drain nodes")
    sent = request.POST if request.method == "POST" else request.GET
    expression = plain(sent.get("nodes", "")).strip()[: host_expression.MOST_LETTERS + 1]
    reason = " ".join(plain(sent.get("reason", "")).split())
    mistake, found = "", None
    if expression:
        try:
            found = bulk.preview(expression)
        except (BadHostExpression, bulk.UnknownNodes) as error:
            mistake = str(error)
    if request.method == "POST" and found is not None:
        if reason and len(reason) <= orders.MOST_REASON:
            return _drain(request, user, expression, reason)
        messages.error(request, f"Enter a reason of at most {orders.MOST_REASON} characters.")
    context = {
        "section": "cluster",
        "place": "drains",
        "expression": expression,
        "mistake": mistake,
        "found": found,
        "headline": headline(found) if found is not None else None,
        "most_reason": orders.MOST_REASON,
        "most_letters": host_expression.MOST_LETTERS,
        "most_nodes": host_expression.MOST_NODES,
    }
    return render(request, "nodes/bulk_drain.html", context, status=400 if request.method == "POST" else 200)


def _drain(request: HttpRequest, user: User, expression: str, reason: str) -> HttpResponse:
    outcomes = bulk.drain_all(user, expression, reason, replace=bool(request.POST.get("replace")))
    ordered = [outcome for outcome in outcomes if outcome.order is not None]
    left = [outcome.node for outcome in outcomes if outcome.order is None]
    text = f"Ordered to drain {formatting.plural(len(ordered), 'node')}."
    if left:
        names = formatting.listed(left, 5)
        messages.warning(request, f"{text} Left as they are, because somebody else drained them: {names}.")
    else:
        messages.success(request, text)
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
