"""The tab that lists a federation's clients, and why some dropped out."""

from __future__ import annotations

from dataclasses import dataclass

from django.contrib.auth.decorators import login_required
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import render
from django.views.decorators.http import require_safe

from jobs.gathering import federation as gathered
from jobs.gathering.clients import SORTS, is_descending, ordered
from jobs.views.job import page_of
from portal.http.paging import page_or_first

ROWS = 50
COLUMNS = (
    ("number", "Client", ""), ("worst", "Accuracy", "num"), ("loss", "Loss", "num wide-only"),
    ("samples", "Samples", "num wide-only"), ("trained", "Trained", "num wide-only"), ("late", "Late", "num"),
    ("dropped", "Dropped", "num"), ("rejected", "Rejected", "num"), ("seconds", "Per round", "num wide-only"),
)  # fmt: skip
BY_LOSS = [
    (name, title, {"worst": "num wide-only", "loss": "num"}.get(name, classes)) for name, title, classes in COLUMNS
]
"""Shown if there is no accuracy; phones have room for only one of them."""


@dataclass(frozen=True)
class ClientColumn:
    """A sortable column. `sort` is what a click requests, `direction` the current order."""

    name: str
    title: str
    classes: str
    sort: str
    direction: str


@login_required
@require_safe
def table(request: HttpRequest, job_id: int) -> HttpResponse:
    shown = page_of(request, job_id)
    if shown.job.kind != "federated":
        raise Http404("only a federation has clients")
    sort = request.GET.get("sort", "")
    if sort not in SORTS:
        sort = gathered.worst_first(shown.life)
    rows, order = ordered(shown.job, sort)
    part = page_or_first(rows, order, cursor=request.GET.get("after"), limit=ROWS)
    dropped, has_more = gathered.dropout_groups(shown.life)
    fairness = gathered.fairness_of(shown.life, part.items)
    columns = BY_LOSS if fairness and fairness.measure == "loss" else COLUMNS
    is_timed = fairness is not None and fairness.is_timed
    context = shown.context(
        "clients",
        fairness=fairness,
        columns=[_column(*column, sort) for column in columns if is_timed or column[0] != "seconds"],
        next=part.next,
        is_later="after" in request.GET,
        dropped=dropped,
        has_more_dropped=has_more,
    )
    return render(request, "jobs/clients.html", context)


def _column(name: str, title: str, classes: str, sort: str) -> ClientColumn:
    rises = {name: not is_descending(name), f"-{name}": is_descending(name)}.get(sort)
    direction = "" if rises is None else "ascending" if rises else "descending"
    return ClientColumn(name, title, classes, f"-{name}" if sort == name else name, direction)
