"""REST: the GPU use of a job."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any

import numpy as np
from django.http import HttpResponse
from ninja import Query, Router, Schema
from pydantic import Field

from jobs.api.request import job_of
from jobs.api.runs.series import short
from jobs.gathering import gpus as gathered
from nodes.telemetry.fields import GPU_FIELDS
from portal.http.api import ApiRequest, bad_field, json_response, one_of

router = Router(tags=["jobs"])


class HeatQuery(Schema):
    """A field of all the job's GPUs."""

    field: Annotated[str, one_of(GPU_FIELDS, "a field of a GPU")] = Field(
        "gpu_percent", description=", ".join(GPU_FIELDS)
    )
    start: int | None = Field(None, ge=0, lt=2**40, alias="from", description="Unix second; default: the first start.")
    end: int | None = Field(None, ge=0, lt=2**40, alias="to", description="Unix second; default: the last end, or now.")
    columns: int = Field(240, ge=1, le=2_000, description="Maximum number of columns.")
    digits: int = Field(4, ge=3, le=15, description="Round to this many significant digits.")


class HeatRowShape(Schema):
    """A GPU while allocated to an attempt; if only launchers report, all GPUs of a node together, with `gpu` null."""

    attempt: int
    node: str
    gpu: int | None
    uuid: str
    since: datetime
    until: datetime | None
    mean: list[float | None] = Field(description="One value per column; null: no samples.")
    most: list[float | None]


class HeatShape(Schema):
    items: list[HeatRowShape]
    next: str | None = None
    source: str = Field(description="agent: per GPU, by its node's agent; launcher: per node; empty: no data.")
    field: str
    start: int = Field(description="Unix second at which the first column begins.")
    width: int = Field(description="Seconds of a column.")
    columns: int
    mean: float | None = Field(description="Mean over all rows and columns.")


@router.get("/{int:job_id}/gpus", response=HeatShape, summary="A job's GPU use, over all its nodes and attempts")
def gpus(request: ApiRequest, job_id: int, query: Query[HeatQuery]) -> HttpResponse:
    """Return one field, a row per GPU and attempt, from the node agents or else from what the launchers logged."""
    job = job_of(request, job_id)
    if query.start is not None and query.end is not None and query.start > query.end:
        raise bad_field("from", f"{query.start} is after to = {query.end}. Swap them.")
    heat = gathered.heat(job, query.field, start=query.start, end=query.end, columns=query.columns, user=request.auth)
    same = ("source", "field", "start", "width", "columns", "mean")
    items = [_row(row, query.digits) for row in heat.rows]
    return json_response({"items": items, "next": None, **{name: getattr(heat, name) for name in same}})


def _row(row: gathered.GpuUseRow, digits: int) -> dict[str, Any]:
    same = ("attempt", "node", "gpu", "uuid", "since", "until")
    columns = {name: short(np.asarray(getattr(row, name)), digits) for name in ("mean", "most")}
    return {name: getattr(row, name) for name in same} | columns
