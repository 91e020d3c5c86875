"""REST: burn-ins of nodes, for sysadmins."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from typing import Annotated, Any, Literal

from django.conf import settings
from ninja import Query, Router, Schema, Status
from pydantic import Field, StringConstraints

from jobs.burnins import golden, report
from jobs.burnins import start as burnins
from jobs.burnins.report import ItemReport
from jobs.errors import Conflict
from nodes.burnin import plan
from nodes.models import BurnIn, BurnInNode, GoldenRecord
from portal.http.api import ApiRequest, PageQuery, Text, bad_field, shaped_page
from portal.http.openapi import described
from portal.http.paging import SortOrder, page
from portal.http.problems import Problem
from portal.sysadmins import FORBIDDEN, only_sysadmins, only_sysadmins_see
from vigil_core import host_expression
from vigil_core.host_expression import BadHostExpression

router = Router(tags=["burn-ins"])
NO_BURN_IN = FORBIDDEN | {404: "No such burn-in, or the node is not in it."}
HostExpression = Annotated[str, StringConstraints(min_length=1, max_length=255, pattern=r"^[A-Za-z0-9_.,\[\]\-]+$")]
MAX_CHARACTERS = 256 * plan.MAX_NODES
MAX_LISTED = 20
"""The largest ones have 5,120 nodes, whose results are counted."""


class BurnInFindingShape(Schema):
    text: str
    is_warning: bool = Field(description="A warning does not fail the node.")


class BurnInNodeShape(Schema):
    """Describes one node: its verdict with reasons, and what became of it."""

    node: str
    verdict: str = Field(description="passed, failed or inconclusive; empty: not judged yet.")
    findings: list[BurnInFindingShape] = Field(description="In sentences, the reasons to fail first.")
    outcome: str = Field(description="What became of the node; empty while the burn-in runs.")
    was_drained: bool
    earlier_reason: str = Field(description="Why it was drained before.")
    gpu_model: str
    driver: str
    tests: int = Field(description="How many tests have results.")
    failures: int = Field(description="How many tests have failed at least once.")


class BurnInShape(Schema):
    id: int
    state: str = Field(description="waiting, starting, running, returning or ended.")
    detail: str = Field(description="What it waits for.")
    problem: str = Field(description="Why the burn-in ended early; empty if it did not.")
    seconds: int
    progress: float | None = Field(description="Elapsed fraction of the test time; null while no tests run.")
    started_by: str | None
    requested_at: datetime
    started_at: datetime | None
    ended_at: datetime | None
    scheduler_id: str
    nodes: list[BurnInNodeShape]
    url: str


class BurnIns(Schema):
    items: list[BurnInShape]
    next: str | None = None


class ItemShape(Schema):
    """Compares all results of one test of one item, such as the copy "host to GPU 3", with others."""

    test: str
    item: str
    count: int
    failures: int
    value: float | None = Field(description="Median of the node's results.")
    unit: str
    peers: float | None = Field(description="Median of others in the same burn-in.")
    golden: float | None = Field(description="Median of passed burn-ins of this model and driver.")
    earlier: float | None = Field(description="Median in this node's previous burn-in.")
    digests: list[str] = Field(description="SHA-256 of matrix products.")
    basis: str = Field(
        description="Model and software that must agree for results to be comparable; of a mount, its type and source."
    )
    detail: str


class BurnInNodeDetail(BurnInNodeShape):
    results: list[ItemShape]
    log: str = Field(description="The end of what the tests printed, on all nodes.")


class GoldenShape(Schema):
    model: str
    driver: str
    test: str
    kind: str
    basis: str
    value: float | None
    unit: str
    digest: str
    count: int = Field(description="Number of node results behind this record.")


class GoldenRecords(Schema):
    items: list[GoldenShape]
    next: str | None = None


class BurnInQuery(PageQuery):
    node: Text = ""
    state: Literal["", "active", "ended"] = ""


class NewBurnIn(Schema):
    model_config = {"extra": "forbid"}
    nodes: list[HostExpression] = Field(
        min_length=1, max_length=plan.MAX_NODES, description="Names or host expressions, such as dgx[01-04,07]."
    )
    seconds: int = Field(plan.DEFAULT_SECONDS, ge=plan.MIN_SECONDS, le=plan.MAX_SECONDS)
    may_undrain: bool = Field(False, description="Nodes that a person drained return to service if they pass.")


class GoldenReset(Schema):
    model_config = {"extra": "forbid"}
    model: str = Field(max_length=128, pattern=r"^[^\x00]*$")
    driver: str = Field("", max_length=40, pattern=r"^[^\x00]*$")


@contextmanager
def burn_in_problems() -> Iterator[None]:
    """Answer what refuses a burn-in, or the acceptance that needs one, as a problem of the request."""
    try:
        yield
    except burnins.NeedsAgreement as error:
        raise Problem(409, f"{error} Send `may_undrain`: true to agree.", kind="drained") from None
    except Conflict as error:
        raise Problem(409, str(error)) from None
    except (burnins.CannotBurnIn, BadHostExpression) as error:
        raise bad_field("nodes", str(error)) from None


@router.post(
    "",
    response={201: BurnInShape},
    summary="Start a burn-in (sysadmins)",
    openapi_extra=described(
        errors=FORBIDDEN
        | {
            409: "A node is in maintenance or in a burn-in already, or a person drained it.",
            422: "The request is invalid.",
        }
    ),
)
def start(request: ApiRequest, body: NewBurnIn) -> Status[dict[str, Any]]:
    """Test nodes inside a reservation, once no job runs there. Those that pass are in service afterwards."""
    only_sysadmins(request, "start burn-ins")
    with burn_in_problems():
        names = host_expression.expand(" ".join(body.nodes), plan.MAX_NODES, MAX_CHARACTERS)
        started = burnins.start(request.auth, names, body.seconds, may_undrain=body.may_undrain)
    return Status(201, burn_in_shape(_burn_in(started.pk)))


@router.get("", response=BurnIns, summary="Burn-ins, newest first", openapi_extra=described(errors=FORBIDDEN))
def burn_ins(request: ApiRequest, query: Query[BurnInQuery]) -> dict[str, Any]:
    """List burn-ins, all or those of one node; at most 20 a page."""
    only_sysadmins_see(request, "burn-ins")
    rows = BurnIn.objects.all()
    if query.state:
        rows = rows.active() if query.state == "active" else rows.filter(state=BurnIn.BurnInState.ENDED)
    if query.node:
        rows = rows.filter(pk__in=BurnInNode.objects.filter(node=query.node).values("burn_in"))
    rows = rows.select_related("started_by").prefetch_related(report.COUNTED).defer("log")
    found = page(rows, SortOrder("id", descending=True), cursor=query.cursor, limit=min(query.limit, MAX_LISTED))
    return {"items": [burn_in_shape(row) for row in found.items], "next": found.next}


@router.get("/golden", response=GoldenRecords, summary="Golden records", openapi_extra=described(errors=FORBIDDEN))
def golden_records(request: ApiRequest, query: Query[PageQuery]) -> dict[str, Any]:
    """List what passed burn-ins measured, by model and driver."""
    only_sysadmins_see(request, "burn-ins")
    return shaped_page(GoldenRecord.objects.all(), SortOrder("id"), query, _golden_shape)


@router.post("/golden/reset", response={204: None}, summary="Delete golden records (sysadmins)",
             openapi_extra=described(errors=FORBIDDEN | {404: "There are none of this model and driver."}))  # fmt: skip
def reset_golden(request: ApiRequest, body: GoldenReset) -> Status[None]:
    """Delete the records of a model and driver; the next passed burn-in begins new ones."""
    only_sysadmins(request, "delete golden records")
    if not golden.reset(request.auth, body.model, body.driver):
        raise Problem(404, f"There are no golden records of {body.model} with driver {body.driver or '(none)'}.")
    return Status(204, None)


@router.get(
    "/{int:burn_in_id}", response=BurnInShape, summary="One burn-in", openapi_extra=described(errors=NO_BURN_IN)
)
def burn_in(request: ApiRequest, burn_in_id: int) -> dict[str, Any]:
    """Return a burn-in with the verdict about each node."""
    only_sysadmins_see(request, "burn-ins")
    return burn_in_shape(_burn_in(burn_in_id))


@router.get("/{int:burn_in_id}/nodes/{node}", response=BurnInNodeDetail, summary="One node's results",
            openapi_extra=described(errors=NO_BURN_IN))  # fmt: skip
def burn_in_node(request: ApiRequest, burn_in_id: int, node: str) -> dict[str, Any]:
    """Return a node's results next to those of its peers, as far as they were made."""
    only_sysadmins_see(request, "burn-ins")
    found = _burn_in(burn_in_id)
    rows = report.counted_nodes(found.nodes).select_related("burn_in")
    row = None if "\0" in node else rows.filter(node=node).first()
    if row is None:
        raise Problem(404, f"{node} is not in burn-in {burn_in_id}.")
    return _node_shape(row) | {"results": [_item_shape(item) for item in report.item_reports(row)], "log": found.log}


@router.post("/{int:burn_in_id}/cancel", response=BurnInShape, summary="Cancel a burn-in (sysadmins)",
             openapi_extra=described(errors=NO_BURN_IN | {409: "The burn-in has no tests left to stop."}))  # fmt: skip
def cancel(request: ApiRequest, burn_in_id: int) -> dict[str, Any]:
    """End the tests. Nodes that were drained before are drained again."""
    only_sysadmins(request, "cancel burn-ins")
    found = _burn_in(burn_in_id)
    try:
        burnins.cancel(request.auth, found)
    except Conflict as error:
        raise Problem(409, str(error)) from None
    return burn_in_shape(_burn_in(burn_in_id))


def burn_in_shape(row: BurnIn) -> dict[str, Any]:
    same = ("id", "state", "detail", "problem", "seconds", "requested_at", "started_at", "ended_at", "scheduler_id")
    return {name: getattr(row, name) for name in same} | {
        "progress": report.progress(row),
        "started_by": row.started_by.username if row.started_by else None,
        "nodes": [_node_shape(node) for node in row.nodes.all()],
        "url": f"{settings.VIGIL_PUBLIC_URL}/burnins/{row.pk}",
    }


def _node_shape(row: Any) -> dict[str, Any]:
    same = ("node", "verdict", "findings", "outcome", "was_drained", "earlier_reason")
    machine = row.tested_machine
    return {name: getattr(row, name) for name in same} | {
        "gpu_model": machine.gpu_model if machine else "",
        "driver": machine.driver if machine else "",
        "tests": row.test_count,
        "failures": row.failed_count,
    }


def _item_shape(item: ItemReport) -> dict[str, Any]:
    same = ("test", "item", "count", "failures", "unit", "digests", "basis", "detail")
    return {name: getattr(item.summary, name) for name in same} | {
        name: getattr(item, name) for name in ("value", "peers", "golden", "earlier")
    }


def _golden_shape(row: GoldenRecord) -> dict[str, Any]:
    same = ("model", "driver", "test", "kind", "basis", "unit", "digest", "count")
    return {name: getattr(row, name) for name in same} | {"value": golden.value_of(row)}


def _burn_in(burn_in_id: int) -> BurnIn:
    rows = BurnIn.objects.select_related("started_by").prefetch_related(report.COUNTED)
    found = rows.filter(pk=burn_in_id).first()
    if found is None:
        raise Problem(404, f"There is no burn-in {burn_in_id}. GET /api/v1/burnins lists them.")
    return found
