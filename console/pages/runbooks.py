"""Render the pages of runbooks: what to do about each cause, by Vigil or by the site."""

from __future__ import annotations

from django.contrib import messages
from django.contrib.auth.decorators import login_required
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.views.decorators.http import require_http_methods, require_POST, require_safe

from console.pages import docs
from diagnosis import runbook
from diagnosis.causes import CAUSES, Cause
from jobs.postmortem import runbooks
from portal.access import CLUSTER, can, sysadmin_of, user_of
from portal.markdown import render as render_markdown
from portal.models import SiteRunbook

DOMAIN_TITLES = {
    "gpu": "GPUs", "network": "Network", "collective": "Collectives", "rendezvous": "Rendezvous", "memory": "Memory",
    "storage": "Storage", "checkpoint": "Checkpoints", "numerics": "Numerics", "program": "Program", "data": "Data",
    "environment": "Environment", "federated": "Federated training", "scheduler": "Scheduler", "unknown": "Other",
    "none": "Other",
}  # fmt: skip


@login_required
@require_safe
def index(request: HttpRequest) -> HttpResponse:
    changed = set(SiteRunbook.objects.values_list("code", flat=True))
    groups: dict[str, list[tuple[Cause, bool]]] = {}
    for cause in CAUSES.values():
        groups.setdefault(DOMAIN_TITLES[cause.domain], []).append((cause, cause.code in changed))
    return render(request, "portal/runbooks.html", {"section": "postmortems", "domains": groups.items()})


@login_required
@require_safe
def runbook_page(request: HttpRequest, code: str) -> HttpResponse:
    """Show a runbook; `?own=1` shows the built-in one where the site has its own."""
    cause, user = _cause(code), user_of(request)
    found = runbooks.find(code)
    shows_built_in = "own" in request.GET and found.site is not None
    text = found.builtin if shows_built_in else found.text
    context = {
        "section": "postmortems",
        "cause": cause,
        "site": found.site,
        "shows_built_in": shows_built_in,
        "html": render_markdown(runbook.without_title(text), deeper=0, link=_address),
        "may_change": can(user, "change", CLUSTER),
    }
    return render(request, "portal/runbook.html", context)


@login_required
@require_http_methods(["GET", "POST"])
def edit(request: HttpRequest, code: str) -> HttpResponse:
    cause, user = _cause(code), sysadmin_of(request, "change runbooks")
    found = runbooks.find(code)
    text, problem = found.text, ""
    if request.method == "POST":
        text = request.POST.get("text", "")
        try:
            runbooks.write(user, code, text)
        except ValueError as error:
            problem = str(error)
        else:
            messages.success(request, f"Saved the site’s runbook for {code}.")
            return redirect("runbook", code)
    context = {
        "section": "postmortems",
        "cause": cause,
        "text": text,
        "problem": problem,
        "site": found.site,
        "most": SiteRunbook.MAX_LENGTH,
    }
    return render(request, "portal/runbook_edit.html", context, status=422 if problem else 200)


@login_required
@require_POST
def restore_built_in(request: HttpRequest, code: str) -> HttpResponse:
    """Delete the site's runbook, so that the built-in one is shown."""
    _cause(code)
    if runbooks.reset(sysadmin_of(request, "change runbooks"), code):
        messages.success(request, "The built-in runbook is shown again.")
    return redirect("runbook", code)


def _cause(code: str) -> Cause:
    cause = CAUSES.get(code)
    if cause is None:
        raise Http404
    return cause


def _address(href: str) -> str:
    return docs.address(href, "runbooks") or href
