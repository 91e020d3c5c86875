"""REST: hot spares, which stand by for other nodes of their partition."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from ninja import Query, Router, Schema, Status
from pydantic import Field

from nodes.drains import spares
from nodes.models import HotSpare, Node
from portal.http.api import ApiRequest, PageQuery, Text, bad_field, shaped_page
from portal.http.openapi import described
from portal.http.paging import SortOrder
from portal.http.problems import Problem
from portal.sysadmins import FORBIDDEN, only_sysadmins

router = Router(tags=["drains"])


class HotSpareShape(Schema):
    """A node that Vigil keeps drained until another of its partition fails."""

    node: str
    partition: str
    state: str = Field(description="standby, or serving in place of another.")
    replaces: str = Field(description="The node whose place it takes; empty: none.")
    since: datetime
    added_by: str | None


class HotSpares(Schema):
    items: list[HotSpareShape]
    next: str | None = None


class NewSpare(Schema):
    model_config = {"extra": "forbid"}
    node: Text
    partition: Text = Field(description="One of the node's partitions: for nodes of this one it stands by.")


@router.get("", response=HotSpares, summary="Hot spares, by node")
def hot_spares(request: ApiRequest, query: Query[PageQuery]) -> dict[str, Any]:
    """List the spares: which stand by, and which took another's place."""
    rows = HotSpare.objects.select_related("added_by")
    return shaped_page(rows, SortOrder("node"), query, _shape)


@router.post(
    "",
    response={201: HotSpareShape},
    summary="Make a node a hot spare (sysadmins)",
    openapi_extra=described(errors=FORBIDDEN | {422: "The node is unknown, a spare already, or not in the partition."}),
)
def add_spare(request: ApiRequest, body: NewSpare) -> Status[dict[str, Any]]:
    """Keep a node drained until another of the partition fails. Running jobs continue."""
    only_sysadmins(request, "change hot spares")
    node = Node.objects.reported().filter(name=body.node).first()
    if node is None:
        raise bad_field("node", f"The scheduler does not know {body.node!r}.")
    try:
        return Status(201, _shape(spares.add(request.auth, node, body.partition)))
    except spares.NotSuitable as error:
        raise bad_field("node", str(error)) from None


@router.post(
    "/{str:node}/remove",
    response={204: None},
    summary="Remove a hot spare: an ordinary node again (sysadmins)",
    openapi_extra=described(
        errors=FORBIDDEN | {404: "No such spare.", 409: "It would return to service with an open finding."}
    ),
)
def remove_spare(request: ApiRequest, node: str) -> Status[None]:
    """Undrain the node if only that kept it out of service."""
    only_sysadmins(request, "change hot spares")
    spare = None if "\0" in node else HotSpare.objects.filter(node=node).first()
    if spare is None:
        raise Problem(404, f"{node} is not a hot spare. GET /api/v1/spares lists them.")
    try:
        spares.remove(request.auth, spare)
    except spares.NotSuitable as error:
        raise Problem(409, str(error)) from None
    return Status(204, None)


def _shape(spare: HotSpare) -> dict[str, Any]:
    copied = ("node", "partition", "state", "replaces", "since")
    return {name: getattr(spare, name) for name in copied} | {
        "added_by": spare.added_by.username if spare.added_by else None
    }
