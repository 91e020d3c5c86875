"""Render /burnins: the list with a form that starts one, and each burn-in with verdicts and results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from django.contrib import messages
from django.contrib.auth.decorators import login_required
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.views.decorators.http import require_http_methods, require_POST, require_safe

from console.pages.requests import is_fragment, vary_on_fragment
from jobs.burnins import golden, report
from jobs.burnins import start as burnins
from jobs.errors import Conflict
from nodes.burnin import plan
from nodes.burnin.judge import FAILED, INCONCLUSIVE, PASSED
from nodes.models import BurnIn, BurnInNode, GoldenRecord
from portal.access import sysadmin_of
from portal.http.paging import SortOrder, page_or_first
from vigil_core import host_expression
from vigil_core.formatting import listed, plural
from vigil_core.host_expression import BadHostExpression
from vigil_core.untrusted import plain, whole

PER_PAGE = 50
MAX_GOLDEN = 200
MAX_CHARACTERS = 20_000
"""In the field of nodes: all names of the largest burn-in, one by one."""
DURATIONS = (("1 minute", 60), ("10 minutes", 600), ("1 hour", 3_600), ("8 hours", 28_800), ("48 hours", 172_800))
GLYPHS = {PASSED: "completed", FAILED: "failed"}


@dataclass(frozen=True)
class BurnInRow:
    """A burn-in with its nodes in a sentence."""

    burn_in: BurnIn
    nodes: Sequence[BurnInNode]

    @property
    def title(self) -> str:
        names = [row.node for row in self.nodes]
        return listed(names) if len(names) <= 3 else f"{names[0]} and {plural(len(names) - 1, 'more node')}"

    @property
    def glyph(self) -> str:
        if self.burn_in.is_active:
            return "running" if self.burn_in.state == "running" else "pending"
        verdicts = {row.verdict for row in self.nodes}
        return "failed" if FAILED in verdicts else "completed" if verdicts == {PASSED} else "cancelled"

    @property
    def result(self) -> str:
        """Return what came of it, or how far it is."""
        burn_in = self.burn_in
        if burn_in.is_active:
            if (done := report.progress(burn_in)) is not None:
                return f"running, {done:.0%}"
            return burn_in.detail or burn_in.get_state_display()
        if len(self.nodes) == 1:
            return self.nodes[0].verdict or burn_in.problem.rstrip(".") or "no result"
        counts = [
            f"{sum(row.verdict == verdict for row in self.nodes)} {verdict}"
            for verdict in (PASSED, FAILED, INCONCLUSIVE)
            if any(row.verdict == verdict for row in self.nodes)
        ]
        return ", ".join(counts) or burn_in.problem.rstrip(".") or "no result"


@dataclass(frozen=True)
class NodeCard:
    """Shows one node of a burn-in. `items`: its results; only of the node that the address names."""

    row: BurnInNode
    items: Sequence[report.ItemReport]
    earlier: Sequence[BurnInNode]

    @property
    def glyph(self) -> str:
        return GLYPHS.get(self.row.verdict, "running" if not self.row.verdict else "warn")

    @property
    def machine_text(self) -> str:
        machine = self.row.tested_machine
        if machine is None:
            return ""
        driver = f", driver {machine.driver}" if machine.driver else ""
        count = f"{machine.gpus} × " if machine.gpus else ""
        return f"{count}{machine.model}{driver}, torch {machine.torch}"


@dataclass(frozen=True)
class BurnInForm:
    """The form that starts a burn-in or an acceptance, as it was sent. `mistake` says why none was started."""

    nodes: str
    seconds: int = plan.DEFAULT_SECONDS
    may_undrain: bool = False
    mistake: str = ""
    needs_agreement: bool = False
    status: int = 200

    @classmethod
    def read(cls, request: HttpRequest, default_seconds: int = plan.DEFAULT_SECONDS) -> BurnInForm:
        seconds = whole(request.POST.get("seconds"), 2**31)
        return cls(
            plain(request.POST.get("nodes", "")).strip()[:MAX_CHARACTERS],
            default_seconds if seconds is None else seconds,
            "may_undrain" in request.POST,
        )

    def refused(self, error: Exception) -> BurnInForm:
        """Return the form with the mistake: 409 if the nodes are in use, or somebody else drained them."""
        needs_agreement = isinstance(error, burnins.NeedsAgreement)
        text = f"{error} Tick the box to agree." if needs_agreement else str(error)
        status = 409 if isinstance(error, Conflict) else 422
        return replace(self, mistake=text, needs_agreement=needs_agreement, status=status)


@login_required
@require_safe
def index(request: HttpRequest) -> HttpResponse:
    sysadmin_of(request, "see burn-ins")
    node = plain(request.GET.get("node", ""))[:255]
    return _list_page(request, BurnInForm(node), node)


@login_required
@require_http_methods(["GET", "HEAD", "POST"])
def start(request: HttpRequest) -> HttpResponse:
    """Start a burn-in of the nodes that the form's host expression names. A form with a mistake is shown again."""
    user = sysadmin_of(request, "start burn-ins")
    if request.method != "POST":  # the page of a refused form refreshes itself, and may be loaded again
        return redirect("burn_ins")
    form = BurnInForm.read(request)
    try:
        names = host_expression.expand(form.nodes, plan.MAX_NODES, MAX_CHARACTERS)
        burn_in = burnins.start(user, names, form.seconds, may_undrain=form.may_undrain)
    except (burnins.CannotBurnIn, BadHostExpression, Conflict) as error:
        return _list_page(request, form.refused(error))
    return redirect("burn_in", burn_in.pk)


def _list_page(request: HttpRequest, form: BurnInForm, node: str = "") -> HttpResponse:
    """Return the list of burn-ins, or of those of one node, below the form."""
    rows = BurnIn.objects.all()
    if node:
        rows = rows.filter(pk__in=BurnInNode.objects.filter(node=node).values("burn_in"))
    found_rows = rows.select_related("started_by").prefetch_related(report.VERDICTS).defer("log")
    newest_first = SortOrder("id", descending=True)
    found = page_or_first(found_rows, newest_first, cursor=request.GET.get("after"), limit=PER_PAGE)
    context = {
        "section": "cluster",
        "place": "burnins",
        "node": node,
        "form": form,
        "most_characters": MAX_CHARACTERS,
        "rows": [BurnInRow(row, list(row.nodes.all())) for row in found.items],
        "next": found.next,
        "durations": DURATIONS,
        "golden": [(row, golden.value_of(row)) for row in GoldenRecord.objects.all()[:MAX_GOLDEN]],
        "models": list(GoldenRecord.objects.values_list("model", "driver").distinct().order_by("model", "driver")[:50]),
    }
    template = "nodes/_burn_ins.html" if is_fragment(request) else "nodes/burn_ins.html"
    return vary_on_fragment(render(request, template, context, status=form.status))


@login_required
@require_safe
def burn_in_page(request: HttpRequest, burn_in_id: int) -> HttpResponse:
    sysadmin_of(request, "see burn-ins")
    found = _burn_in(burn_in_id)
    rows: list[Any] = list(report.counted_nodes(found.nodes.select_related("burn_in"))[: plan.MAX_NODES])
    chosen = plain(request.GET.get("node", "")) or (rows[0].node if len(rows) == 1 else "")
    cards = [
        NodeCard(
            row,
            report.item_reports(row) if row.node == chosen else (),
            report.earlier_rows(row) if row.node == chosen else (),
        )
        for row in rows
    ]
    context = {
        "section": "cluster",
        "place": "burnins",
        "burn_in": found,
        "shown": BurnInRow(found, rows),
        "progress": report.progress(found),
        "cards": cards,
    }
    return vary_on_fragment(
        render(request, "nodes/_burn_in.html" if is_fragment(request) else "nodes/burn_in.html", context)
    )


@login_required
@require_POST
def cancel(request: HttpRequest, burn_in_id: int) -> HttpResponse:
    user = sysadmin_of(request, "cancel burn-ins")
    try:
        burnins.cancel(user, _burn_in(burn_in_id))
    except Conflict as error:
        messages.error(request, str(error))
    return redirect("burn_in", burn_in_id)


@login_required
@require_POST
def reset_golden(request: HttpRequest) -> HttpResponse:
    """Delete the golden records of a model and driver."""
    user = sysadmin_of(request, "delete golden records")
    model, driver = plain(request.POST.get("model", ""))[:128], plain(request.POST.get("driver", ""))[:40]
    if not golden.reset(user, model, driver):
        messages.error(request, f"There are no golden records of {model}.")
    return redirect("burn_ins")


def _burn_in(burn_in_id: int) -> BurnIn:
    found = BurnIn.objects.select_related("started_by", "cancel_requested_by").filter(pk=burn_in_id)
    if (row := found.first()) is None:
        raise Http404(f"There is no burn-in {burn_in_id}.")
    return row
