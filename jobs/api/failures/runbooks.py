"""REST: runbooks, which say what to do about each cause of failure."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from ninja import Router, Schema
from pydantic import Field

from diagnosis.causes import CAUSES
from jobs.postmortem import runbooks
from portal.http.api import ApiRequest
from portal.http.openapi import described
from portal.http.problems import Problem

router = Router(tags=["jobs"])


class RunbookShape(Schema):
    code: str
    title: str = Field(description="The cause in plain words.")
    owner: str = Field(description="Who must act: researcher, sysadmin, both, nobody.")
    advice: str = Field(description="What to do first, in a sentence or two.")
    markdown: str = Field(description="The site's text if it has one, else Vigil's.")
    is_site: bool = Field(description="Whether the text is the site's.")
    changed_at: datetime | None
    changed_by: str | None


@router.get(
    "/{code}",
    response=RunbookShape,
    summary="What to do about a cause",
    openapi_extra=described(errors={404: "No such cause."}),
)
def runbook(request: ApiRequest, code: str) -> dict[str, Any]:
    """Return the runbook of a cause such as `gpu.off_bus`: its meaning, what it is confused with, and what helps."""
    cause = CAUSES.get(code)
    if cause is None:
        raise Problem(404, "No such cause. See /runbooks for a list.")
    found = runbooks.find(code)
    site = found.site
    return {
        "code": code, "title": cause.title, "owner": cause.owner, "advice": cause.advice, "markdown": found.text,
        "is_site": site is not None, "changed_at": site.changed_at if site else None,
        "changed_by": site.changed_by.username if site and site.changed_by else None,
    }  # fmt: skip
