"""The pages of runbooks: what to do about each cause, as Vigil says it or as the site does."""

from __future__ import annotations

from django.contrib import messages
from django.contrib.auth.decorators import login_required
from django.core.exceptions import PermissionDenied
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.urls import reverse
from django.views.decorators.http import require_http_methods, require_POST, require_safe

from diagnosis import runbook
from diagnosis.causes import CAUSES, Cause
from jobs.gathering import runbooks
from portal.access import CLUSTER, can, user_of
from portal.markdown import render as render_markdown
from portal.models import SiteRunbook, User

ROOMS = {
    "gpu": "GPUs", "network": "Network", "collective": "Collectives", "rendezvous": "Rendezvous", "memory": "Memory",
    "storage": "Storage", "checkpoint": "Checkpoints", "numerics": "Numbers", "program": "The program", "data": "Data",
    "environment": "Environment", "federated": "Federations", "scheduler": "The scheduler", "unknown": "Neither",
    "none": "Neither",
}  # fmt: skip


@login_required
@require_safe
def index(request: HttpRequest) -> HttpResponse:
    changed = set(SiteRunbook.objects.values_list("code", flat=True))
    rooms: dict[str, list[tuple[Cause, bool]]] = {}
    for cause in CAUSES.values():
        rooms.setdefault(ROOMS[cause.domain], []).append((cause, cause.code in changed))
    return render(request, "portal/runbooks.html", {"section": "jobs", "rooms": rooms.items()})


@login_required
@require_safe
def one(request: HttpRequest, code: str) -> HttpResponse:
    """?own=1: Vigil's own, where the site has another."""
    cause, user = _cause(code), user_of(request)
    found = runbooks.of(code)
    shows_own = "own" in request.GET and found.site is not None
    text = found.own if shows_own else found.text
    context = {
        "section": "jobs",
        "cause": cause,
        "site": found.site,
        "shows_own": shows_own,
        "html": render_markdown(runbook.without_title(text), deeper=0, link=_address),
        "may_change": can(user, "change", CLUSTER),
    }
    return render(request, "portal/runbook.html", context)


@login_required
@require_http_methods(["GET", "POST"])
def edit(request: HttpRequest, code: str) -> HttpResponse:
    cause, user = _cause(code), _sysadmin(request)
    found = runbooks.of(code)
    text, problem = found.text, ""
    if request.method == "POST":
        text = request.POST.get("text", "")
        try:
            runbooks.write(user, code, text)
        except ValueError as error:
            problem = str(error)
        else:
            messages.success(request, f"Saved: this is what the site says about {code}.")
            return redirect("runbook", code)
    context = {
        "section": "jobs",
        "cause": cause,
        "text": text,
        "problem": problem,
        "site": found.site,
        "most": SiteRunbook.MOST,
    }
    return render(request, "portal/runbook_edit.html", context, status=422 if problem else 200)


@login_required
@require_POST
def forget(request: HttpRequest, code: str) -> HttpResponse:
    """Back to Vigil's own."""
    _cause(code)
    if runbooks.forget(_sysadmin(request), code):
        messages.success(request, "Vigil’s own is shown again.")
    return redirect("runbook", code)


def _cause(code: str) -> Cause:
    cause = CAUSES.get(code)
    if cause is None:
        raise Http404
    return cause


def _sysadmin(request: HttpRequest) -> User:
    user = user_of(request)
    if not can(user, "change", CLUSTER):
        raise PermissionDenied("Sysadmins change runbooks. Ask one of them.")
    return user


def _address(href: str) -> str:
    code = runbook.linked_cause(href)
    return reverse("runbook", args=[code]) if code else href
