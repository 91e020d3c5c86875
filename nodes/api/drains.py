"""REST: which nodes are out of service, who took them out, and whether the reason still stands."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from django.conf import settings
from ninja import Query, Router, Schema
from pydantic import Field

from nodes.api.nodes import OrderShape, ReadingShape, order_shape
from nodes.cluster import sync
from nodes.drains import cost, overview
from nodes.drains.overview import DrainedNode
from nodes.models import Reading
from portal.http.api import ApiRequest, WantedPage
from portal.http.paging import SortOrder, page

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
    cause: str = Field(description="What the reason's wording means, such as kill failed or not responding.")
    about: str = Field(description='"node" or "user": whose problem it is, if the reason begins with such a tag.')
    since: datetime | None
    standing: str = Field(description="Whether the reason is still true: stands, over or unknown.")
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


@router.get("", response=Drains, summary="Nodes out of service, by name")
def drains(request: ApiRequest, wanted: Query[WantedPage]) -> dict[str, Any]:
    """List drained, draining, down and failing nodes: who took each out, and whether the reason still stands."""
    found = page(overview.out_of_service(), SortOrder("name"), cursor=wanted.cursor, limit=wanted.limit)
    return {
        "items": [_drain_shape(drained) for drained in overview.described(found.items)],
        "next": found.next,
        "reading": sync.readings()[Reading.Part.NODES],
    }


def _drain_shape(drained: DrainedNode) -> dict[str, Any]:
    node = drained.node
    return {
        "node": node.name,
        "state": node.state,
        "reason": drained.reason.text,
        "holder": drained.holder,
        "holder_name": drained.holder_name,
        "cause": drained.reason.cause,
        "about": drained.reason.about,
        "since": node.reason_at,
        "standing": drained.judgement.standing,
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
