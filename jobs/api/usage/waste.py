"""REST: GPU-hours allocated, used and idle."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import date, datetime
from typing import Annotated, Any, Literal

from django.conf import settings
from django.http import StreamingHttpResponse
from django.utils import timezone
from ninja import Query, Router, Schema
from pydantic import Field

from jobs.waste import report, sentences
from jobs.waste.notices import IdleJob
from jobs.waste.report import FORMER_SORTS, GROUPINGS, MAX_DAYS, SORTS, WasteEntry, WasteFilter
from portal.http import csv_file
from portal.http.api import ApiRequest, Cursor, bad_field, one_of
from portal.http.openapi import deprecated, described, with_former_names
from portal.models import User
from vigil_core import formatting
from vigil_core.untrusted import whole

router = Router(tags=["cluster"])
CSV_HEADER = ("by", "name", "project", "person", "job", "scheduler_id", "held_hours", "used_hours", "idle_hours")
CSV_ROWS = 5_000  # at most
ORDERS = (*SORTS, *(f"-{name}" for name in SORTS), *FORMER_SORTS)


class WasteQuery(Schema):
    """The days, grouping and order of the report."""

    days: int = Field(7, ge=1, le=MAX_DAYS, description="Number of days in UTC; the last one is today so far.")
    by: Annotated[str, one_of(GROUPINGS, "a grouping")] = Field("project", description=", ".join(GROUPINGS))
    sort: Annotated[str, one_of(ORDERS, "an order")] = Field("-idle", description=f"{', '.join(SORTS)}; - reverses.")


class WastePageQuery(WasteQuery):
    limit: int = Field(50, ge=1, le=200, description="Items a page.")
    cursor: Cursor


class WasteRow(Schema):
    """The GPU use of one project, person or job in these days."""

    name: str
    project: str = Field(description="Empty: from outside Vigil, or several.")
    person: str = Field(description="A person here, else the scheduler's user; empty: several.")
    job: int | None = Field(description="Vigil's job number, if it is a Vigil job that you can see.")
    scheduler_id: str = Field(description="The scheduler's id; of one attempt, if there are several.")
    allocated_hours: float = Field(description="Allocated GPU-hours, as far as sampled.")
    held_hours: float = deprecated("allocated_hours")
    used_hours: float = Field(description="Allocated GPU-hours times utilisation.")
    idle_hours: float = Field(description="Allocated GPU-hours without any activity.")
    used_share: float | None


class WasteTotal(Schema):
    allocated_hours: float
    held_hours: float = deprecated("allocated_hours")
    used_hours: float
    idle_hours: float
    used_share: float | None
    idle_cost: float | None = Field(description="Null: the site has not set a price of a GPU-hour.")
    currency: str


class IdleShape(Schema):
    """A job with allocated GPUs that have been idle for 15 minutes."""

    scheduler_id: str
    job: int | None
    name: str
    person: str
    gpus: int = Field(description="Idle GPUs.")
    allocated_gpus: int = Field(description="Allocated GPUs, idle or not.")
    held: int = deprecated("allocated_gpus")
    since: datetime = Field(description="Start of the longest idle time.")
    nodes: list[str]


class Waste(Schema):
    items: list[WasteRow]
    next: str | None
    days: int
    since: date = Field(description="The first of the days.")
    by: Literal["project", "person", "job"]
    text: str = Field(description="Summary in a sentence.")
    total: WasteTotal
    idle_now: list[IdleShape] = Field(description="Jobs that you may see, longest idle first.")


@router.get("/waste", response=Waste, summary="GPU-hours allocated, used and idle, by project, person or job")
def waste(request: ApiRequest, query: Query[WastePageQuery]) -> dict[str, Any]:
    """Return GPU-hours, about 20 minutes behind as samples are merged first. The site decides whose jobs you see."""
    skip = whole(query.cursor or "0", 2**31)
    if skip is None:
        raise bad_field("cursor", "Invalid cursor. Start without one.")
    now, filters = timezone.now(), _filters(query)
    waste_report = report.find(request.auth, filters, now, limit=query.limit, skip=skip)
    idle = report.idle_now(request.auth, now)
    lead, also = sentences.summary(waste_report, filters, sum(len(job.idle) for job, _ in idle))
    return {
        "items": [_row(row) for row in waste_report.rows],
        "next": None if waste_report.is_last else str(skip + query.limit),
        "days": filters.days,
        "since": filters.since(now),
        "by": filters.by,
        "text": formatting.plain_spaces(f"{lead} {also}"),
        "total": _hours(waste_report.total) | _cost(waste_report.total),
        "idle_now": [_idle(job, may_open) for job, may_open in idle],
    }


@router.get(
    "/waste.csv",
    summary="The same report as CSV",
    openapi_extra=described(csv_file.description(CSV_HEADER, most=CSV_ROWS)),
)
def as_csv(request: ApiRequest, query: Query[WasteQuery]) -> StreamingHttpResponse:
    """Download the report as CSV. Names that a spreadsheet would read as a formula are prefixed with an apostrophe."""
    filters, user = _filters(query), request.auth
    name = f"waste-{filters.by}-{filters.days}d.csv"
    return csv_file.csv_response(request, name, CSV_HEADER, lambda: _csv_rows(user, filters))


def _csv_rows(user: User, filters: WasteFilter) -> Iterator[Sequence[object]]:
    for row in report.find(user, filters, timezone.now(), limit=CSV_ROWS).rows:
        hours = (f"{value:.4f}" for value in (row.hours.allocated, row.hours.used, row.hours.idle))
        yield [filters.by, row.name, row.project, row.person, row.job, row.scheduler_id, *hours]


def _filters(query: WasteQuery) -> WasteFilter:
    return WasteFilter(days=query.days, by=query.by, sort=report.current_sort(query.sort))


def _row(row: WasteEntry) -> dict[str, Any]:
    same = ("name", "project", "person", "job", "scheduler_id")
    return {name: getattr(row, name) for name in same} | _hours(row.hours)


def _hours(hours: report.AllocatedHours) -> dict[str, float | None]:
    values = {f"{name}_hours": round(getattr(hours, name), 4) for name in ("allocated", "used", "idle")}
    share = None if hours.share is None else round(hours.share, 4)
    return with_former_names({**values, "used_share": share}, held_hours="allocated_hours")


def _cost(hours: report.AllocatedHours) -> dict[str, Any]:
    price = settings.VIGIL_GPU_HOUR_PRICE
    return {"idle_cost": round(hours.idle * price, 2) if price else None, "currency": settings.VIGIL_CURRENCY}


def _idle(job: IdleJob, may_open: bool) -> dict[str, Any]:
    return {
        "scheduler_id": job.scheduler_id,
        "job": job.attempt.job_id if job.attempt and may_open else None,
        "name": job.name,
        "person": job.person,
        "gpus": len(job.idle),
        "allocated_gpus": job.gpu_count,
        "held": job.gpu_count,
        "since": job.since,
        "nodes": job.nodes,
    }
