"""REST API of racks: the position of each node."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any

import msgspec
from django.http import HttpResponse
from django.utils import timezone
from ninja import Router, Schema
from pydantic import Field

from nodes.cluster import racks
from nodes.models import Assessment, RackPlace
from nodes.monitoring.temperatures import hourly, racks_in_order
from portal.http.api import ApiRequest, too_large
from portal.http.openapi import described
from portal.http.posts import UNREADABLE
from portal.http.problems import Problem
from portal.sysadmins import only_sysadmins
from vigil_core import bounded

router = Router(tags=["cluster"])
_PLACE = {
    "type": "object",
    "required": ["node", "rack"],
    "properties": {
        "node": {"type": "string"},
        "rack": {"type": "string", "maxLength": 64},
        "slot": {"type": "integer", "default": 0, "description": "Position from the top."},
        "order": {"type": "integer", "default": 0, "description": "Position of the rack among racks."},
    },
}
_RACKS = {
    "type": "object",
    "required": ["items"],
    "properties": {"items": {"type": "array", "items": _PLACE, "maxItems": racks.MOST}},
}
_CSV = {"schema": {"type": "string", "description": "node,rack,slot,order"}}


class RackPlaceShape(Schema):
    """The position of a node."""

    node: str
    rack: str
    slot: int = Field(description="Position from the top.")
    order: int = Field(description="Position of the rack among racks; racks with the same value are sorted by name.")


class RackHourShape(Schema):
    """The mean inlet temperature of a rack in one hour."""

    at: datetime
    inlet_c: float
    is_estimate: bool = Field(description="Not measured by BMCs all the time.")


class RackInletShape(Schema):
    """The temperature of the air that a rack's nodes take in."""

    rack: str
    inlet_c: float | None = Field(description="Now; null: no node of the rack reports.")
    above_neighbours_c: float | None = Field(description="Above the median of up to two racks on either side.")
    is_estimate: bool = Field(description="Estimated from GPU temperature and power, not measured by BMCs.")
    nodes: int = Field(description="Nodes with a value.")
    hours: list[RackHourShape] = Field(description="The last 24 hours, oldest first.")


class RackInlets(Schema):
    items: list[RackInletShape]
    next: str | None = None


class RackPlaces(Schema):
    items: list[RackPlaceShape]
    next: str | None = None


class RacksReplaced(Schema):
    places: int = Field(description="Number of nodes that have a position now.")
    changed: int = Field(description="Number of nodes that were added, moved or removed.")


class _RackRow(msgspec.Struct, forbid_unknown_fields=True):
    node: str
    rack: str
    slot: int = 0
    order: int | None = None


class _RackBody(msgspec.Struct, forbid_unknown_fields=True):
    items: list[_RackRow]


@router.get("", response=RackPlaces, summary="Racks: the position of each node")
def places(request: ApiRequest) -> Any:
    """List every node that has a position, by rack and from the top; as CSV with `Accept: text/csv`."""
    rows = RackPlace.objects.all()
    if "text/csv" in request.headers.get("Accept", ""):
        return HttpResponse(racks.as_csv(rows), content_type="text/csv; charset=utf-8")
    return {"items": list(rows)}


@router.get("/temperatures", response=RackInlets, summary="Inlet temperatures of racks")
def temperatures(request: ApiRequest) -> dict[str, Any]:
    """List the inlet temperature of each rack, now and by the hour, in the order in which racks stand."""
    now = timezone.now()
    current = {row.item: row.fields for row in Assessment.objects.fresh(now).filter(signal="rack_inlet")}
    hours = hourly(timedelta(hours=24), now)
    items = []
    for rack, _ in racks_in_order():
        fields = current.get(rack, {})
        items.append(
            {
                "rack": rack,
                "inlet_c": fields.get("inlet_c"),
                "above_neighbours_c": fields.get("above_neighbours_c"),
                "is_estimate": fields.get("is_estimate", True),
                "nodes": fields.get("nodes", 0),
                "hours": [
                    {"at": hour.hour, "inlet_c": round(hour.celsius, 2), "is_estimate": hour.is_estimate}
                    for hour in hours.get(rack, [])
                ],
            }
        )
    return {"items": items}


@router.put(
    "",
    response=RacksReplaced,
    summary="Replace the positions of all nodes (sysadmins)",
    openapi_extra=described(
        {"requestBody": {"required": True, "content": {"application/json": {"schema": _RACKS}, "text/csv": _CSV}}},
        errors={
            403: "Only for sysadmins, with a token of scope admin.",
            413: f"The body is larger than {racks.MAX_BYTES:,} bytes.",
            415: "The body is neither application/json nor text/csv.",
            422: "Some lines are invalid. `errors` names each.",
        },
    ),
)
def put_places(request: ApiRequest) -> dict[str, int]:
    """Replace all positions; nodes that are left out are in no rack. Nothing is stored if a line is wrong.

    A body of type text/csv has the columns node, rack, slot, order; slot and order may be left out.
    """
    only_sysadmins(request, "change racks")
    given = _read(request)
    return {"changed": racks.replace(request.auth, given), "places": len(given)}


def _read(request: ApiRequest) -> Sequence[racks.RackPosition]:
    if len(request.body) > racks.MAX_BYTES:
        raise too_large()
    try:
        if request.content_type == "text/csv":
            return racks.parse_csv(request.body.decode())
        if request.content_type == "application/json":
            bounded.check_json(request.body)
            return racks.parse_cells(map(_cells, msgspec.json.decode(request.body, type=_RackBody).items))
    except racks.WrongPlaces as error:
        errors = [{"field": f"line {mistake.line}", "message": mistake.message} for mistake in error.mistakes]
        raise Problem(422, str(error).replace("\n", " "), kind="invalid", errors=errors) from None  # type: ignore[arg-type]
    except msgspec.ValidationError as error:
        raise Problem(422, f"{error}.", kind="invalid") from None
    except (*UNREADABLE, bounded.TooComplex) as error:
        raise Problem(400, f"The body cannot be read: {error}.") from None
    raise Problem(415, "Send application/json or text/csv.")


def _cells(position: _RackRow) -> tuple[str, str, str, str]:
    return position.node, position.rack, str(position.slot), "" if position.order is None else str(position.order)
