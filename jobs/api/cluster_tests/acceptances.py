"""REST: acceptances of rented or new clusters, for sysadmins."""

from __future__ import annotations

from datetime import datetime
from typing import Any, Literal

from django.conf import settings
from ninja import Query, Router, Schema, Status
from pydantic import Field

from jobs.acceptances import start as acceptances
from jobs.api.cluster_tests.burnins import burn_in_problems
from jobs.burnins import report
from jobs.errors import Conflict
from nodes.burnin import plan
from nodes.models import Acceptance
from portal.http.api import ApiRequest, PageQuery, shaped_page
from portal.http.openapi import described
from portal.http.paging import SortOrder
from portal.http.problems import Problem
from portal.sysadmins import FORBIDDEN, only_sysadmins, only_sysadmins_see
from vigil_core.host_expression import MAX_CHARACTERS

router = Router(tags=["acceptances"])
NO_ACCEPTANCE = FORBIDDEN | {404: "No such acceptance."}
DEFAULT_SECONDS = 48 * 3600


class ClauseShape(Schema):
    key: str
    group: str = Field(description="configuration, limits, security, tests or failures.")
    title: str
    requirement: str
    source: str = Field(description="Who requires it.")
    outcome: str = Field(description="passed, failed, not checked, not applicable, or pending: not measured yet.")
    measured: str
    details: list[str] = Field(description="What is wrong, in sentences.")


class AcceptanceShape(Schema):
    id: int
    result: str = Field(description="accepted, rejected or inconclusive; empty while it runs.")
    summary: str = Field(description="The outcome in a sentence.")
    nodes: str = Field(description="The host expression that was requested.")
    node_count: int
    gpu_count: int
    seconds: int
    burn_in: int
    state: str = Field(description="State of its burn-in: waiting, starting, running, returning or ended.")
    detail: str = Field(description="What its burn-in waits for.")
    progress: float | None = Field(description="Elapsed fraction of the test time; null while no tests run.")
    started_by: str | None
    requested_at: datetime
    ended_at: datetime | None
    url: str


class AcceptanceDetail(AcceptanceShape):
    clauses: list[ClauseShape]


class Acceptances(Schema):
    items: list[AcceptanceShape]
    next: str | None = None


class AcceptanceQuery(PageQuery):
    state: Literal["", "active", "ended"] = ""


class NewAcceptance(Schema):
    model_config = {"extra": "forbid"}
    nodes: str = Field(min_length=1, max_length=MAX_CHARACTERS, description="A host expression, such as dgx[01-08].")
    seconds: int = Field(DEFAULT_SECONDS, ge=plan.MIN_SECONDS, le=plan.MAX_SECONDS)
    may_undrain: bool = Field(False, description="Nodes that a person drained return to service if they pass.")


@router.post(
    "",
    response={201: AcceptanceDetail},
    summary="Start an acceptance (sysadmins)",
    openapi_extra=described(
        errors=FORBIDDEN
        | {
            409: "A node is in maintenance or in a burn-in already, or a person drained it.",
            422: "The request is invalid.",
        }
    ),
)
def start(request: ApiRequest, body: NewAcceptance) -> Status[dict[str, Any]]:
    """Check the configuration of nodes, burn them in with all pairs, and count failures meanwhile."""
    only_sysadmins(request, "start acceptances")
    with burn_in_problems():
        started = acceptances.start(request.auth, body.nodes, body.seconds, may_undrain=body.may_undrain)
    return Status(201, detail_shape(_acceptance(started.pk)))


@router.get("", response=Acceptances, summary="Acceptances, newest first", openapi_extra=described(errors=FORBIDDEN))
def acceptance_list(request: ApiRequest, query: Query[AcceptanceQuery]) -> dict[str, Any]:
    """List acceptances without their clauses."""
    only_sysadmins_see(request, "acceptances")
    rows = Acceptance.objects.select_related("burn_in", "started_by").defer("clauses", "peaks", "burn_in__log")
    if query.state:
        rows = rows.active() if query.state == "active" else rows.exclude(result="")
    return shaped_page(rows, SortOrder("id", descending=True), query, acceptance_shape)


@router.get(
    "/{int:acceptance_id}",
    response=AcceptanceDetail,
    summary="One acceptance, clause by clause",
    openapi_extra=described(errors=NO_ACCEPTANCE),
)
def acceptance(request: ApiRequest, acceptance_id: int) -> dict[str, Any]:
    """Return an acceptance with what was required, by whom, and what was measured."""
    only_sysadmins_see(request, "acceptances")
    return detail_shape(_acceptance(acceptance_id))


@router.post(
    "/{int:acceptance_id}/cancel",
    response=AcceptanceDetail,
    summary="Cancel an acceptance (sysadmins)",
    openapi_extra=described(errors=NO_ACCEPTANCE | {409: "The acceptance has ended, or has no tests left to stop."}),
)
def cancel(request: ApiRequest, acceptance_id: int) -> dict[str, Any]:
    """End its tests. The acceptance becomes inconclusive, or rejected for what was found by then."""
    only_sysadmins(request, "cancel acceptances")
    try:
        acceptances.cancel(request.auth, _acceptance(acceptance_id))
    except Conflict as error:
        raise Problem(409, str(error)) from None
    return detail_shape(_acceptance(acceptance_id))


def acceptance_shape(row: Acceptance) -> dict[str, Any]:
    same = ("id", "result", "summary", "node_count", "gpu_count", "requested_at", "ended_at")
    return {name: getattr(row, name) for name in same} | {
        "nodes": row.expression,
        "seconds": row.burn_in.seconds,
        "burn_in": row.burn_in.pk,
        "state": row.burn_in.state,
        "detail": row.burn_in.detail,
        "progress": report.progress(row.burn_in),
        "started_by": row.started_by.username if row.started_by else None,
        "url": f"{settings.VIGIL_PUBLIC_URL}/acceptances/{row.pk}",
    }


def detail_shape(row: Acceptance) -> dict[str, Any]:
    return acceptance_shape(row) | {"clauses": row.clauses}


def _acceptance(acceptance_id: int) -> Acceptance:
    rows = Acceptance.objects.select_related("burn_in", "started_by")
    found = rows.filter(pk=acceptance_id).first()
    if found is None:
        raise Problem(404, f"There is no acceptance {acceptance_id}. GET /api/v1/acceptances lists them.")
    return found
