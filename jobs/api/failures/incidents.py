"""REST: all incidents, newest first."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, Literal

from django.conf import settings
from django.http import HttpResponse
from ninja import Query, Router, Schema
from pydantic import Field

from diagnosis.causes import CAUSES
from jobs.gathering import verdicts
from jobs.listing.incidents import IncidentSearch
from jobs.models import Incident
from portal.http.api import ApiRequest, Moment, PageQuery, Text, json_response, one_of
from portal.http.openapi import deprecated

router = Router(tags=["post-mortems"])
Owner = Literal["", "researcher", "sysadmin", "both", "nobody"]


class IncidentRow(Schema):
    id: int
    job: int
    name: str
    project: str
    attempt: int = Field(description="Its number.")
    incarnation: int | None = Field(
        description="Incarnation whose ranks were restarted in place; null: the attempt ended."
    )
    at: datetime
    cause: str = Field(description="Empty while its logs are being read.")
    confidence: float | None
    owner: str = Field(description="Who must act.")
    summary: str = Field(description="What happened, in a sentence.")
    says: str = deprecated("summary")
    node: str
    rank: int | None
    version: int
    is_final: bool
    is_overruled: bool
    overruled_by: str = Field(description="Who named the cause; empty: the evidence, or a deleted user.")
    is_confirmed: bool = Field(description="Confirmed by the machine or the scheduler, if a sysadmin must act.")
    published_at: datetime | None
    url: str


class Incidents(Schema):
    items: list[IncidentRow]
    next: str | None


class IncidentQuery(PageQuery):
    """Filters of the list; repeat `project` and `cause` for several."""

    project: list[Text] = []
    cause: Annotated[list[str], one_of(list(CAUSES), "a cause")] = []
    owner: Owner = Field("", description="Who must act on the cause.")
    node: Text = ""
    published: bool | None = None
    since: Moment | None = None


@router.get(
    "/postmortems",
    response=Incidents,
    summary="Incidents, newest first",
    operation_id="jobs_api_postmortems_postmortems",  # generated clients know it by this name
)
def postmortems(request: ApiRequest, query: Query[IncidentQuery]) -> HttpResponse:
    """Return failed attempts, each with a post-mortem at its job, and restarts in place."""
    search = IncidentSearch(
        projects=query.project,
        causes=query.cause,
        owner=query.owner,
        node=query.node,
        is_published=query.published,
        since=query.since,
    )
    results = search.page(request.auth, cursor=query.cursor, limit=query.limit)
    return json_response({"items": [incident_row(incident) for incident in results.items], "next": results.next})


def incident_row(incident: Incident) -> dict[str, Any]:
    attempt = incident.attempt
    place = "postmortem?attempt=" if incident.ended_its_attempt else "attempts#attempt-"
    return {
        "id": incident.pk,
        "job": attempt.job_id,
        "name": attempt.job.name,
        "project": incident.project.slug,
        "attempt": attempt.number,
        "incarnation": incident.incarnation,
        "at": incident.at,
        "cause": incident.cause,
        "confidence": incident.confidence,
        "owner": CAUSES[incident.cause].owner if incident.cause in CAUSES else "",
        "summary": (summary := verdicts.summary(incident)),
        "says": summary,
        "node": incident.node,
        "rank": incident.rank,
        "version": incident.version,
        "is_final": incident.is_final,
        "is_overruled": incident.is_overruled,
        "overruled_by": incident.overruled_by.username if incident.overruled_by else "",
        "is_confirmed": incident.is_confirmed,
        "published_at": incident.published_at,
        "url": f"{settings.VIGIL_PUBLIC_URL}/jobs/{attempt.job_id}/{place}{attempt.number}",
    }
