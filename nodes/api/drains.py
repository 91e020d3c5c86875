"""REST: which nodes are out of service and whether the reason still stands; drain many nodes at once."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any

from django.conf import settings
from ninja import Query, Router, Schema, Status
from pydantic import Field

from nodes.api.nodes import OrderShape, ReadingShape, Reason, order_shape
from nodes.cluster import sync
from nodes.drains import bulk, bulk_return, cost, overview
from nodes.drains.bulk import BulkOutcome
from nodes.drains.overview import DrainedNode
from nodes.models import Reading
from portal.http.api import ApiRequest, PageQuery
from portal.http.openapi import described
from portal.http.paging import SortOrder, page
from portal.http.problems import Problem
from portal.sysadmins import only_sysadmins
from vigil_core import host_expression
from vigil_core.host_expression import BadHostExpression

router = Router(tags=["drains"])


class DrainShape(Schema):
    """A node out of service."""

    node: str
    state: str
    reason: str = Field(description="As the scheduler reports it, without whom Vigil named in it.")
    holder: str = Field(
        description="Who took it out: person, rule, spare, maintenance, burn-in, nhc, health check, slurm or unknown."
    )
    holder_name: str = Field(description="The person's, the rule's or the program's name; empty: unknown.")
    approved_by: str = Field(description="Who approved the drain that the rule proposed; empty: nobody had to.")
    cause: str = Field(description="What the reason's wording means, such as kill failed or not responding.")
    about: str = Field(description='"node" or "user": whose problem it is, if the reason begins with such a tag.')
    since: datetime | None
    standing: str = Field(description="Whether the problem persists: stands (yes), over (no) or unknown.")
    facts: list[str] = Field(description="What was observed since: rebooted, GPU replaced, no process left …")
    has_jobs: bool = Field(description="Jobs still run there, or are completing.")
    gpus: int
    idle_gpus: int
    cost_per_hour: float | None = Field(description="Idle GPUs times VIGIL_GPU_HOUR_PRICE; null without a price.")
    currency: str
    advice: str
    entries: list[int] = Field(description="Health entries that led to the drain: GET /api/v1/health/{id}.")
    order: OrderShape | None = Field(description="The drain order, if Vigil drained it.")
    pending: OrderShape | None = Field(description="An order that waits for the scheduler.")


class Drains(Schema):
    items: list[DrainShape]
    next: str | None = None
    reading: ReadingShape


ERRORS = {403: "Only for sysadmins, with a token of scope admin."}
BAD_NODES = {422: "The expression names no nodes, unknown ones, or too many."}


class NodeNamesRequest(Schema):
    model_config = {"extra": "forbid"}
    nodes: str = Field(
        min_length=1, max_length=host_expression.MAX_CHARACTERS,
        description="Names and host expressions as Slurm writes them: dgx[01-16,20],login1. At most 1,000 nodes.",
    )  # fmt: skip


Replaces = Annotated[
    dict[str, str] | None,
    Field(
        description="The reasons of others that you have seen and mean to replace, by node, as `reasons` of the "
        "preview has them. Nodes with another reason by now are left as they are.",
    ),
]


class BulkDrainRequest(NodeNamesRequest):
    reason: Reason = Field(description="The reason that the scheduler shows; your name is added.")
    replaces: Replaces = None
    replace: bool = Field(
        False, description="Replace every drain of others, also those that came after the preview. Without `replaces`."
    )


class BulkReturnRequest(NodeNamesRequest):
    reason: Reason = Field(description="Why they return; it is kept with the orders and in the audit log.")
    replaces: Replaces = None
    replace: bool = Field(
        False, description="End every drain of others, also those that came after the preview. Without `replaces`."
    )


class PartitionShareShape(Schema):
    name: str
    nodes: int
    hit: int = Field(description="How many of its nodes would be drained.")
    out: int = Field(description="How many would then be out of service, for any reason.")


class DrainPreviewShape(Schema):
    """What a drain of these nodes would hit."""

    nodes: list[str]
    out_already: list[str] = Field(description="Those that are out of service already.")
    reasons: dict[str, str] = Field(description="Their reasons by node: send them as `replaces` to replace them.")
    jobs: int = Field(description="Running jobs there; they continue.")
    users: list[str] = Field(description="Whose jobs these are.")
    gpus: int = Field(description="GPUs in service that would take no new jobs.")
    cluster_gpus: int = Field(description="All GPUs in service.")
    partitions: list[PartitionShareShape]


class ReturnPreviewShape(Schema):
    """Which drains a return of these nodes would end."""

    yours: list[DrainShape] = Field(description="Your own drains, and nodes that are down without a reason.")
    by_others: list[DrainShape] = Field(description="Drains of others: they stay unless you name them in `replaces`.")
    reasons: dict[str, str] = Field(description="Their reasons by node: send them as `replaces` to end them, too.")
    in_service: list[str] = Field(description="Nodes that take jobs already.")


class BulkOutcomeShape(Schema):
    node: str
    order: OrderShape | None = Field(description="Null: nothing was ordered.")
    problem: str = Field(description="Why nothing was ordered: somebody else drained the node, or it is in service.")
    is_drained_by_another: bool = Field(description="Somebody else took it out of service: see `replaces`.")


class BulkOutcomes(Schema):
    items: list[BulkOutcomeShape]
    next: str | None = None


@router.get("", response=Drains, summary="Nodes out of service, by name")
def drains(request: ApiRequest, query: Query[PageQuery]) -> dict[str, Any]:
    """List drained, draining, down and failing nodes: who took each out, and whether the reason still stands."""
    found = page(overview.out_of_service(), SortOrder("name"), cursor=query.cursor, limit=query.limit)
    return {
        "items": [_drain_shape(drained) for drained in overview.described(found.items)],
        "next": found.next,
        "reading": sync.readings()[Reading.Part.NODES],
    }


@router.post(
    "/preview",
    response=DrainPreviewShape,
    summary="What a drain of these nodes would hit (sysadmins)",
    openapi_extra=described(errors=ERRORS | BAD_NODES),
)
def preview(request: ApiRequest, body: NodeNamesRequest) -> dict[str, Any]:
    """Return running jobs, partitions and the share of capacity that a drain would hit. Changes nothing."""
    only_sysadmins(request, "drain nodes")
    try:
        found = bulk.preview(body.nodes)
    except (BadHostExpression, bulk.UnknownNodes) as error:
        raise _bad_nodes(error) from None
    return {
        "nodes": [node.name for node in found.nodes],
        "out_already": [node.name for node in found.out_already],
        "reasons": found.reasons,
        "jobs": found.jobs,
        "users": list(found.users),
        "gpus": found.gpus,
        "cluster_gpus": found.cluster_gpus,
        "partitions": [
            {"name": share.name, "nodes": share.nodes, "hit": share.hit, "out": share.out} for share in found.partitions
        ],
    }


@router.post(
    "",
    response={202: BulkOutcomes},
    summary="Drain many nodes (sysadmins)",
    openapi_extra=described(errors=ERRORS | BAD_NODES),
)
def drain_many(request: ApiRequest, body: BulkDrainRequest) -> Status[dict[str, Any]]:
    """Order to drain every node of the expression for one reason; running jobs continue.

    Nodes that somebody else has drained are left as they are, with the reason in `problem`, unless `replaces` has that
    reason.
    """
    only_sysadmins(request, "drain nodes")
    try:
        outcomes = bulk.drain_all(request.auth, body.nodes, body.reason, replace=body.replace, replaces=body.replaces)
    except (BadHostExpression, bulk.UnknownNodes) as error:
        raise _bad_nodes(error) from None
    return Status(202, {"items": [_outcome_shape(outcome) for outcome in outcomes]})


@router.post(
    "/return/preview",
    response=ReturnPreviewShape,
    summary="Which drains a return of these nodes would end (sysadmins)",
    openapi_extra=described(errors=ERRORS | BAD_NODES),
)
def return_preview(request: ApiRequest, body: NodeNamesRequest) -> dict[str, Any]:
    """Return whose drains these are, and whether their reasons still stand. Changes nothing."""
    only_sysadmins(request, "return nodes to service")
    try:
        found = bulk_return.preview(request.auth, body.nodes)
    except (BadHostExpression, bulk.UnknownNodes) as error:
        raise _bad_nodes(error) from None
    return {
        "yours": [_drain_shape(drained) for drained in found.yours],
        "by_others": [_drain_shape(drained) for drained in found.by_others],
        "reasons": found.reasons,
        "in_service": [node.name for node in found.in_service],
    }


@router.post(
    "/return",
    response={202: BulkOutcomes},
    summary="Return many nodes to service (sysadmins)",
    openapi_extra=described(errors=ERRORS | BAD_NODES),
)
def return_many(request: ApiRequest, body: BulkReturnRequest) -> Status[dict[str, Any]]:
    """Order to undrain every node of the expression.

    Drains of others are left as they are, with the reason in `problem`, unless `replaces` has that reason.
    """
    only_sysadmins(request, "return nodes to service")
    try:
        outcomes = bulk_return.return_all(
            request.auth, body.nodes, body.reason, replace=body.replace, replaces=body.replaces
        )
    except (BadHostExpression, bulk.UnknownNodes) as error:
        raise _bad_nodes(error) from None
    return Status(202, {"items": [_outcome_shape(outcome) for outcome in outcomes]})


def _outcome_shape(outcome: BulkOutcome) -> dict[str, Any]:
    order = order_shape(outcome.order) if outcome.order else None
    is_by_another = outcome.is_by_another
    return {
        "node": outcome.node,
        "order": order,
        "problem": outcome.problem,
        "is_drained_by_another": is_by_another,
    }


def _bad_nodes(error: ValueError) -> Problem:
    return Problem(422, str(error), kind="invalid", errors=[{"field": "nodes", "message": str(error)}])


def _drain_shape(drained: DrainedNode) -> dict[str, Any]:
    node = drained.node
    return {
        "node": node.name,
        "state": node.state,
        "reason": drained.reason.text,
        "holder": drained.holder,
        "holder_name": drained.holder_name,
        "approved_by": drained.approved_by,
        "cause": drained.reason.cause,
        "about": drained.reason.about,
        "since": node.reason_at,
        "standing": drained.judgement.validity,
        "facts": list(drained.judgement.facts),
        "has_jobs": drained.has_jobs,
        "gpus": node.gpus,
        "idle_gpus": drained.idle_gpus,
        "cost_per_hour": cost.hourly(drained.idle_gpus),
        "currency": settings.VIGIL_CURRENCY,
        "advice": drained.advice,
        "entries": [entry.pk for entry in drained.findings],
        "order": order_shape(drained.order) if drained.order else None,
        "pending": order_shape(drained.pending) if drained.pending else None,
    }
