"""REST: why a job's attempt ended badly."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from ninja import Query, Router, Schema
from pydantic import Field

from jobs.api.request import job_of
from jobs.models import Diagnosis
from portal.http.api import ApiRequest
from portal.http.openapi import described
from portal.http.problems import Problem

router = Router(tags=["jobs"])


class EvidenceShape(Schema):
    file: str = Field(description="The log; of what is no log, who says so.")
    line: int = Field(description="As `grep -n` counts; 0: it is no line of a log.")
    text: str
    role: str = Field(description="root, confirmation, echo, survived, or context.")
    cause: str
    rank: int | None = None
    node: str = ""
    count: int = 1


class OtherShape(Schema):
    cause: str
    why: str


class PostMortemShape(Schema):
    job: int
    attempt: int = Field(description="Its number.")
    cause: str
    title: str = Field(description="The cause in plain words.")
    confidence: float = Field(description="From 0 to 1.")
    owner: str = Field(description="Who must act: researcher, sysadmin, both, nobody.")
    says: str
    advice: str
    evidence: list[EvidenceShape]
    runner_up: OtherShape | None
    ruled_out: list[OtherShape]
    not_seen: list[str] = Field(description="What could not be looked at.")
    rank: int | None
    node: str
    exception: str
    frame: str = Field(description="The innermost of the person's own code.")
    version: int
    is_final: bool = Field(description="No evidence can come any more.")
    made_at: datetime


class WantedVerdict(Schema):
    attempt: int | None = Field(None, ge=1, le=2**31 - 1, description="Its number; the newest that ended badly.")


@router.get(
    "/{int:job_id}/postmortem",
    response=PostMortemShape,
    summary="Why it ended badly",
    openapi_extra=described(
        errors={404: "You can see no such job, or there is no verdict: nothing went wrong, or just now."}
    ),
)
def postmortem(request: ApiRequest, job_id: int, wanted: Query[WantedVerdict]) -> dict[str, Any]:
    """Answers the newest verdict on an attempt's bad end: one cause, how sure, who must act, and the lines for it.

    It is made from the logs of all ranks, the scheduler's and the launcher's word and what machines told, within
    seconds of the end, and anew while evidence comes.
    """
    job = job_of(request, job_id)
    rows = Diagnosis.objects.filter(incident__attempt__job=job, incident__incarnation=None)
    if wanted.attempt is not None:
        rows = rows.filter(incident__attempt__number=wanted.attempt)
    newest = rows.select_related("incident__attempt").order_by("-incident__attempt__number", "-version").first()
    if newest is None:
        which = f"Attempt {wanted.attempt} of it" if wanted.attempt is not None else "It"
        raise Problem(404, f"There is no verdict on #{job.pk}. {which} has not ended badly, or did just now.")
    told = {**newest.verdict, "job": job.pk, "attempt": newest.incident.attempt.number}
    return {**told, "version": newest.version, "is_final": newest.incident.is_final, "made_at": newest.made_at}
