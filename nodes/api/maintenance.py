"""REST: planned maintenance of nodes."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from ninja import Query, Router, Schema, Status
from pydantic import Field

from nodes.drains import maintenance
from nodes.drains.bulk import UnknownNodes
from nodes.models import MaintenanceWindow
from portal.http.api import ApiRequest, Moment, PageQuery, Text, bad_field, shaped_page
from portal.http.openapi import described
from portal.http.paging import SortOrder
from portal.http.problems import Problem
from portal.sysadmins import FORBIDDEN, only_sysadmins
from vigil_core import host_expression
from vigil_core.host_expression import BadHostExpression

router = Router(tags=["drains"])


class MaintenanceShape(Schema):
    """Nodes on which somebody works from one time to another."""

    id: int
    expression: str = Field(description="The nodes as they were named.")
    nodes: list[str]
    reason: str
    starts_at: datetime
    ends_at: datetime
    state: str = Field(description="planned, active, ended or cancelled.")
    wants_reservation: bool
    reservation: str = Field(description="The reservation's name in the scheduler; empty: Vigil drains the nodes.")
    problem: str = Field(description="What the scheduler refused, or which nodes stayed drained.")
    planned_by: str | None
    ended_at: datetime | None


class MaintenanceWindows(Schema):
    items: list[MaintenanceShape]
    next: str | None = None


class WindowQuery(PageQuery):
    all: bool = Field(False, description="Also those that are over.")


class NewWindow(Schema):
    model_config = {"extra": "forbid"}
    nodes: str = Field(min_length=1, max_length=host_expression.MAX_CHARACTERS, description="Such as dgx[01-16,20].")
    reason: Text = Field(description="Shown in the scheduler, on pages and to whoever submits a job.")
    starts_at: Moment
    ends_at: Moment
    reserve: bool = Field(
        False,
        description="Reserve the nodes in the scheduler, which then starts no job that would overlap. Otherwise, or if "
        "the scheduler cannot reserve them, Vigil drains them at the start and undrains them at the end.",
    )


@router.get("", response=MaintenanceWindows, summary="Maintenance windows, newest first")
def windows(request: ApiRequest, query: Query[WindowQuery]) -> dict[str, Any]:
    """List windows that are planned or have begun; with `all` also those that are over."""
    rows = MaintenanceWindow.objects.all() if query.all else MaintenanceWindow.objects.unfinished()
    return shaped_page(rows.select_related("planned_by"), SortOrder("id", descending=True), query, _shape)


@router.post(
    "",
    response={201: MaintenanceShape},
    summary="Plan maintenance of nodes (sysadmins)",
    openapi_extra=described(errors=FORBIDDEN | {422: "The nodes, the reason or the times are wrong."}),
)
def plan(request: ApiRequest, body: NewWindow) -> Status[dict[str, Any]]:
    """Plan a window. While it lasts, no health rule acts on its nodes, and no new job starts there."""
    only_sysadmins(request, "plan maintenance")
    try:
        window = maintenance.plan(
            request.auth, body.nodes, body.reason, body.starts_at, body.ends_at,
            wants_reservation=body.reserve,
        )  # fmt: skip
    except maintenance.BadWindow as error:
        raise bad_field(error.field, str(error)) from None
    except (BadHostExpression, UnknownNodes) as error:
        raise bad_field("nodes", str(error)) from None
    return Status(201, _shape(window))


@router.post(
    "/{int:window_id}/cancel",
    response=MaintenanceShape,
    summary="Cancel or end maintenance (sysadmins)",
    openapi_extra=described(errors=FORBIDDEN | {404: "No such window.", 409: "It is over already."}),
)
def cancel(request: ApiRequest, window_id: int) -> dict[str, Any]:
    """End a window now: its reservation is removed, and what it drained is undrained."""
    only_sysadmins(request, "cancel maintenance")
    rows = MaintenanceWindow.objects.select_related("planned_by")
    window = rows.filter(pk=window_id).first()
    if window is None:
        raise Problem(404, f"There is no maintenance window {window_id}.")
    if not maintenance.cancel(request.auth, window):
        raise Problem(409, f"Maintenance window {window_id} is over already.")
    window.refresh_from_db()
    return _shape(window)


def _shape(window: MaintenanceWindow) -> dict[str, Any]:
    copied = (
        "id", "expression", "nodes", "reason", "starts_at", "ends_at", "state", "wants_reservation", "reservation",
        "problem", "ended_at",
    )  # fmt: skip
    planned_by = window.planned_by.username if window.planned_by else None
    return {name: getattr(window, name) for name in copied} | {"planned_by": planned_by}
