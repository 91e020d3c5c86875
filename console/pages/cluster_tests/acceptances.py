"""Render /acceptances: the list with a form that starts one, and each acceptance clause by clause, also for print."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from django.contrib import messages
from django.contrib.auth.decorators import login_required
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.utils import timezone
from django.views.decorators.http import require_http_methods, require_POST, require_safe

from console.pages.cluster_tests.burnins import DURATIONS, BurnInForm
from console.pages.requests import is_fragment, vary_on_fragment
from jobs.acceptances import start as acceptances
from jobs.burnins import report
from jobs.burnins.start import CannotBurnIn
from jobs.errors import Conflict
from nodes.acceptance.clauses import ACCEPTED, FAILED, NOT_APPLICABLE, NOT_CHECKED, PASSED, REJECTED
from nodes.burnin import plan
from nodes.models import Acceptance, BurnIn
from portal.access import sysadmin_of
from portal.http.paging import SortOrder, page_or_first
from vigil_core import formatting
from vigil_core.host_expression import MAX_CHARACTERS, BadHostExpression
from vigil_core.untrusted import plain

PER_PAGE = 50
RESULT_GLYPHS = {ACCEPTED: "completed", REJECTED: "failed"}
CLAUSE_GLYPHS = {PASSED: "completed", FAILED: "failed", NOT_CHECKED: "warn", NOT_APPLICABLE: "cancelled"}


@dataclass(frozen=True)
class AcceptanceRow:
    """An acceptance with its result, or how far it is."""

    acceptance: Acceptance

    @property
    def glyph(self) -> str:
        if not self.acceptance.is_active:
            return RESULT_GLYPHS.get(self.acceptance.result, "warn")
        return "running" if self.acceptance.burn_in.state == BurnIn.BurnInState.RUNNING else "pending"

    @property
    def title(self) -> str:
        """Return the result, with how many clauses an accepted one leaves open. Reads the clauses."""
        title = str(self.acceptance.get_result_display())
        open_clauses = sum(clause["outcome"] == NOT_CHECKED for clause in self.acceptance.clauses)
        if self.acceptance.result != ACCEPTED or not open_clauses:
            return title
        return f"{title}, {formatting.plural(open_clauses, 'clause')} not checked"

    @property
    def status(self) -> str:
        if not self.acceptance.is_active:
            return self.acceptance.result
        progress = report.progress(self.acceptance.burn_in)
        return (
            f"tests run, {progress:.0%}"
            if progress is not None
            else self.acceptance.burn_in.get_state_display().lower()
        )


@dataclass(frozen=True)
class ClauseRow:
    """A stored clause with its glyph."""

    clause: Mapping[str, Any]

    @property
    def glyph(self) -> str:
        return CLAUSE_GLYPHS.get(self.clause["outcome"], "pending")


@login_required
@require_safe
def index(request: HttpRequest) -> HttpResponse:
    sysadmin_of(request, "see acceptances")
    return _list_page(request, BurnInForm(plain(request.GET.get("nodes", ""))[:MAX_CHARACTERS], plan.MAX_SECONDS))


@login_required
@require_http_methods(["GET", "HEAD", "POST"])
def start(request: HttpRequest) -> HttpResponse:
    """Start an acceptance of the nodes that the form's host expression names. A form with a mistake is shown again."""
    user = sysadmin_of(request, "start acceptances")
    if request.method != "POST":  # the page of a refused form refreshes itself, and may be loaded again
        return redirect("acceptances")
    form = BurnInForm.read(request, plan.MAX_SECONDS)
    try:
        acceptance = acceptances.start(user, form.nodes, form.seconds, may_undrain=form.may_undrain)
    except (CannotBurnIn, BadHostExpression, Conflict) as error:
        return _list_page(request, form.refused(error))
    return redirect("acceptance", acceptance.pk)


def _list_page(request: HttpRequest, form: BurnInForm) -> HttpResponse:
    """Return the list of acceptances below the form."""
    rows = Acceptance.objects.select_related("burn_in", "started_by").defer("clauses", "peaks", "burn_in__log")
    found = page_or_first(rows, SortOrder("id", descending=True), cursor=request.GET.get("after"), limit=PER_PAGE)
    context = {
        "section": "cluster",
        "place": "burnins",
        "form": form,
        "most_characters": MAX_CHARACTERS,
        "rows": [AcceptanceRow(row) for row in found.items],
        "next": found.next,
        "durations": DURATIONS,
    }
    template = "nodes/_acceptances.html" if is_fragment(request) else "nodes/acceptances.html"
    return vary_on_fragment(render(request, template, context, status=form.status))


@login_required
@require_safe
def acceptance_page(request: HttpRequest, acceptance_id: int) -> HttpResponse:
    sysadmin_of(request, "see acceptances")
    found = _acceptance(acceptance_id)
    context = {
        "section": "cluster",
        "place": "burnins",
        "acceptance": found,
        "burn_in": found.burn_in,
        "shown": AcceptanceRow(found),
        "progress": report.progress(found.burn_in),
        "groups": _groups(found.clauses),
        "now": timezone.now(),
    }
    template = "nodes/_acceptance.html" if is_fragment(request) else "nodes/acceptance.html"
    return vary_on_fragment(render(request, template, context))


@login_required
@require_POST
def cancel(request: HttpRequest, acceptance_id: int) -> HttpResponse:
    user = sysadmin_of(request, "cancel acceptances")
    try:
        acceptances.cancel(user, _acceptance(acceptance_id))
    except Conflict as error:
        messages.error(request, str(error))
    return redirect("acceptance", acceptance_id)


def _groups(clauses: Sequence[Mapping[str, Any]]) -> list[tuple[str, list[ClauseRow]]]:
    groups = groupby(clauses, key=lambda clause: str(clause["group"]))
    return [(name, [ClauseRow(clause) for clause in rows]) for name, rows in groups]


def _acceptance(acceptance_id: int) -> Acceptance:
    rows = Acceptance.objects.select_related("burn_in", "burn_in__cancel_requested_by", "started_by")
    if (row := rows.filter(pk=acceptance_id).first()) is None:
        raise Http404(f"There is no acceptance {acceptance_id}.")
    return row
