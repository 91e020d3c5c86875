"""REST: what health rules found, and what became of it."""

from __future__ import annotations

from datetime import datetime
from typing import Any, Literal

from django.utils import timezone
from ninja import Query, Router, Schema
from pydantic import Field

from nodes.api.nodes import OrderShape, Reason, order_shape
from nodes.cluster import drain as orders
from nodes.models import HealthControl, HealthEntry, Node
from nodes.models.health import hidden_fields
from nodes.remediation import alike, inbox
from nodes.remediation.alike import AlikeOutcome
from portal.http.api import ApiRequest, PageQuery, Text, bad_field, shaped_page
from portal.http.openapi import described
from portal.http.paging import SortOrder
from portal.http.problems import Problem
from portal.models import User
from portal.sysadmins import only_sysadmins

router = Router(tags=["health"])
NO_ENTRY = {404: "No such health entry."}
NOT_DECIDED = NO_ENTRY | {
    403: "Only for sysadmins, with a token of scope admin.",
    409: "The decision does not fit the entry's state, or another drain or order would be replaced.",
}


class ObservationShape(Schema):
    """Describes one observation of a signal."""

    at: datetime
    signal: str
    fields: dict[str, bool | int | float | str]
    count: int


class HealthEntryShape(Schema):
    """Describes what one rule found about a GPU or a node, and what was decided."""

    id: int
    node: str
    gpu: int | None = Field(description="The GPU's index; null: it is about the node.")
    gpu_uuid: str | None
    item: str = Field(description="The mount or port that it is about; empty: none.")
    rule: str
    title: str
    detail: str = Field(description="What equal findings on many nodes have in common: versions below a minimum.")
    state: str = Field(description="watching, open, dismissed or cleared.")
    severity: str = Field(description="info, warning, critical or fatal.")
    action: str = Field(description="What the rule wants: ignore, watch, exclude, drain, reset or replace.")
    decision: str = Field(description="Empty, proposed, automatic, approved or dismissed.")
    decided_by: str | None
    decision_reason: str
    held_back: str = Field(description="Why Vigil did not act by itself.")
    is_planted: bool = Field(description="All its evidence was injected by a game day.")
    count: int
    first_seen: datetime
    last_seen: datetime
    opened_at: datetime | None
    cleared_at: datetime | None
    evidence: list[ObservationShape] = Field(description="The newest observations.")
    order: OrderShape | None


class HealthDecisionShape(HealthEntryShape):
    """Describes the entry after a decision, and what the decision did to entries like it."""

    alike_decided: int = Field(0, description="With `alike`: how many other entries were decided, too.")
    alike_left: int = Field(0, description="With `alike`: how many stayed: decided or drained by somebody else.")


class HealthEntries(Schema):
    items: list[HealthEntryShape]
    next: str | None = None


class BreakerShape(Schema):
    """Says whether automatic actions are stopped, and by which rule."""

    tripped_at: datetime | None = Field(description="Null: Vigil acts, if VIGIL_HEALTH=act.")
    rule: str
    detail: str


class EntryQuery(PageQuery):
    state: Literal["", "watching", "open", "dismissed", "cleared"] = Field("", description="Empty: not yet cleared.")
    node: Text = ""
    rule: Text = ""
    severity: Literal["", "info", "warning", "critical", "fatal"] = ""


class DecisionRequest(Schema):
    model_config = {"extra": "forbid"}
    reason: Reason = Field(description="Why; it is kept with the entry and in the audit log.")
    alike: bool = Field(
        False,
        description="Also decide about the other entries of this rule with the same `detail`, state and decision: at "
        f"most {alike.MAX_DISMISSED:,} to dismiss, {alike.MAX_DECIDED_SINGLY} to approve or clear. 409 where each node "
        "may have another cause: what is to be decided or takes nodes out of service, without a `detail`.",
    )


class ApprovalRequest(DecisionRequest):
    replace: bool = Field(False, description="Replace somebody else's drain and its reason; not with `alike`.")


@router.get("", response=HealthEntries, summary="Health entries, newest first")
def entries(request: ApiRequest, query: Query[EntryQuery]) -> dict[str, Any]:
    """List what health rules found: everything that is not cleared, or the entries in one state."""
    rows = HealthEntry.objects.in_state(query.state) if query.state else HealthEntry.objects.active()
    rows = rows.matching(node=query.node, rule=query.rule, severity=query.severity)
    rows = rows.select_related("gpu", "order__asked_by", "decided_by").defer("progress")
    return shaped_page(rows, SortOrder("id", descending=True), query, lambda entry: entry_shape(entry, request.auth))


@router.get("/breaker", response=BreakerShape, summary="Whether automatic actions are stopped")
def breaker(request: ApiRequest) -> dict[str, Any]:
    """Return the breaker's state: it trips when one rule fires almost everywhere at once."""
    return _breaker_shape()


@router.post(
    "/breaker/reset",
    response=BreakerShape,
    summary="Let Vigil act by itself again (sysadmins)",
    openapi_extra=described(errors={403: NOT_DECIDED[403], 409: "The breaker is not tripped."}),
)
def reset_breaker(request: ApiRequest, decision: DecisionRequest) -> dict[str, Any]:
    """Reset the breaker, once it is clear why the rule fired. What it proposed meanwhile stays proposed."""
    only_sysadmins(request, "reset the breaker")
    try:
        inbox.reset_breaker(request.auth, decision.reason)
    except inbox.NotPossible as error:
        raise Problem(409, str(error)) from None
    return _breaker_shape()


@router.get("/{int:entry_id}", response=HealthEntryShape, summary="One entry", openapi_extra=described(errors=NO_ENTRY))
def entry(request: ApiRequest, entry_id: int) -> dict[str, Any]:
    """Return an entry with its newest evidence and its order."""
    return entry_shape(_entry(entry_id), request.auth)


@router.post(
    "/{int:entry_id}/approve",
    response=HealthDecisionShape,
    summary="Do what the rule proposes (sysadmins)",
    openapi_extra=described(errors=NOT_DECIDED),
)
def approve(request: ApiRequest, entry_id: int, decision: ApprovalRequest) -> dict[str, Any]:
    """Drain the node in your name, with the finding as the reason. `order` says what became of it."""
    only_sysadmins(request, "decide about health entries")
    if decision.alike and decision.replace:
        raise bad_field("replace", "Drains of others are replaced one by one: send either `alike` or `replace`.")
    entry = _entry(entry_id)
    outcome = AlikeOutcome(0, 0)
    try:
        if decision.alike:
            outcome = alike.decide(request.auth, "approve", entry.pk, decision.reason)
        else:
            inbox.approve(
                request.auth, entry.pk, decision.reason, replaces=_reason(entry.node) if decision.replace else None
            )
    except orders.NeedsConfirmation as error:
        raise Problem(409, f"{error} Send `replace`: true to drain it anyway.", kind="drained") from None
    except inbox.NotPossible as error:
        raise Problem(409, str(error)) from None
    return _decision_shape(request, entry_id, outcome)


@router.post(
    "/{int:entry_id}/dismiss",
    response=HealthDecisionShape,
    summary="Decide that nothing is to be done (sysadmins)",
    openapi_extra=described(errors=NOT_DECIDED),
)
def dismiss(request: ApiRequest, entry_id: int, decision: DecisionRequest) -> dict[str, Any]:
    """Take no action while this lasts. Once it has cleared, new evidence opens a new entry."""
    only_sysadmins(request, "decide about health entries")
    return _decide("dismiss", request, entry_id, decision)


@router.post(
    "/{int:entry_id}/clear",
    response=HealthDecisionShape,
    summary="End an entry (sysadmins)",
    openapi_extra=described(errors=NOT_DECIDED),
)
def clear(request: ApiRequest, entry_id: int, decision: DecisionRequest) -> dict[str, Any]:
    """End the entry: what was observed until now never opens it again. Vigil returns what was drained for it."""
    only_sysadmins(request, "decide about health entries")
    return _decide("clear", request, entry_id, decision)


def _decide(
    action: Literal["dismiss", "clear"], request: ApiRequest, entry_id: int, decision: DecisionRequest
) -> dict[str, Any]:
    pk, outcome = _entry(entry_id).pk, AlikeOutcome(0, 0)
    try:
        if decision.alike:
            outcome = alike.decide(request.auth, action, pk, decision.reason)
        elif action == "dismiss":
            inbox.dismiss(request.auth, pk, decision.reason)
        else:
            inbox.clear(request.auth, pk, decision.reason)
    except inbox.NotPossible as error:
        raise Problem(409, str(error)) from None
    return _decision_shape(request, pk, outcome)


def _decision_shape(request: ApiRequest, entry_id: int, outcome: AlikeOutcome) -> dict[str, Any]:
    counts = {"alike_decided": outcome.decided, "alike_left": outcome.left}
    return entry_shape(_entry(entry_id), request.auth) | counts


def entry_shape(entry: HealthEntry, user: User) -> dict[str, Any]:
    copied = (
        "id", "node", "item", "rule", "title", "detail", "state", "severity", "action", "decision", "decision_reason",
        "held_back", "is_planted", "count", "first_seen", "last_seen", "opened_at", "cleared_at",
    )  # fmt: skip
    return {name: getattr(entry, name) for name in copied} | {
        "gpu": entry.gpu.index if entry.gpu else None,
        "gpu_uuid": entry.gpu.uuid if entry.gpu else None,
        "decided_by": entry.decided_by.username if entry.decided_by else None,
        "evidence": [
            {
                "at": datetime.fromtimestamp(at, timezone.get_current_timezone()),
                "signal": signal,
                "fields": fields,
                "count": count,
            }
            for at, signal, fields, count in entry.observations(hidden=hidden_fields(user))
        ],
        "order": order_shape(entry.order) if entry.order else None,
    }


def _entry(entry_id: int) -> HealthEntry:
    rows = HealthEntry.objects.select_related("gpu", "order__asked_by", "decided_by")
    found = rows.filter(pk=entry_id).first()
    if found is None:
        raise Problem(404, f"There is no health entry {entry_id}. GET /api/v1/health lists them.")
    return found


def _reason(node: str) -> str | None:
    return Node.objects.filter(name=node).values_list("reason", flat=True).first()


def _breaker_shape() -> dict[str, Any]:
    control = HealthControl.objects.filter(pk=HealthControl.ID).first() or HealthControl()
    return {"tripped_at": control.tripped_at, "rule": control.tripped_by, "detail": control.tripped_detail}
