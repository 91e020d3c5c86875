"""REST: profiles of training steps: request, list and download them."""

from dataclasses import asdict
from datetime import datetime
from typing import Any

from django.http import StreamingHttpResponse
from ninja import Router, Schema, Status
from pydantic import Field

from jobs.api.request import NOT_YOURS, job_of
from jobs.disk import profiles as files
from jobs.models import Attempt
from jobs.profiles import Profile, profiles
from jobs.submitting import profiling
from portal.http.api import ApiRequest, stream
from portal.http.download import as_download
from portal.http.openapi import deprecated, described, with_former_names
from portal.http.problems import Problem

router = Router(tags=["profiles"])
GZIP = {"type": "string", "format": "binary"}


class ProfileRequest(Schema):
    """The steps of a rank to record, starting with the next one."""

    model_config = {"extra": "forbid", "strict": True}
    steps: int = Field(profiling.STEPS, ge=1, le=profiling.MAX_STEPS)
    rank: int = Field(0, ge=0, lt=10**6, description="The rank that records its own steps.")


class RequestedProfile(Schema):
    id: str = Field(description="Id of the profile, as in the list.")


class ProfileShape(Schema):
    id: str
    attempt: int = Field(description="The attempt's number.")
    rank: int
    name: str = Field(description="File name of the trace; empty until it is written.")
    first_step: int | None
    last_step: int | None
    bytes: int
    is_pending: bool = Field(description="Requested, but not written yet.")
    waits: bool = deprecated("is_pending")
    problem: str
    requested_at: datetime | None
    asked_at: datetime | None = deprecated("requested_at")
    saved_at: datetime | None


class Profiles(Schema):
    items: list[ProfileShape]
    next: str | None = None


@router.post(
    "/{int:job_id}/profile",
    response={202: RequestedProfile},
    summary="Profile the next steps of a running job",
    openapi_extra=described(
        errors={
            403: NOT_YOURS,
            404: "No such job that you can see, or nothing to profile yet.",
            409: "The job is not running, or it runs its own program.",
        }
    ),
)
def profile_job(request: ApiRequest, job_id: int, body: ProfileRequest | None = None) -> Status[dict[str, Any]]:
    """Record the next steps of one rank with torch.profiler. The trace then appears in the list of profiles."""
    job = job_of(request, job_id, "change", doing="profiled")
    body = body or ProfileRequest.model_validate({})
    return Status(202, {"id": profiling.request_profile(request.auth, job, steps=body.steps, rank=body.rank)})


@router.get("/{int:job_id}/profiles", response=Profiles, summary="A job's profiles, newest first")
def listed(request: ApiRequest, job_id: int) -> dict[str, Any]:
    """Return profiles, including requested ones that are not written yet and failed ones with the reason."""
    job = job_of(request, job_id)
    return {"items": [_profile_shape(profile) for profile in profiles(job.attempts.all())]}


@router.get(
    "/{int:job_id}/profiles/{int:number}/{str:name}",
    summary="A trace, as chrome://tracing and ui.perfetto.dev open it",
    openapi_extra=described(
        {"responses": {200: {"description": "As written", "content": {"application/gzip": {"schema": GZIP}}}}},
        errors={404: "No such job that you can see, or no such attempt or trace."},
    ),
)
def file(request: ApiRequest, job_id: int, number: int, name: str) -> StreamingHttpResponse:
    """Download a trace. `number` is the attempt's."""
    job = job_of(request, job_id)
    attempt = Attempt.objects.filter(job=job, number=number).select_related("job").first()
    if attempt is None:
        raise Problem(404, f"#{job_id} has no attempt {number}.")
    download = files.download(attempt, name)
    return as_download(stream(request, download.pieces, "application/gzip"), download.name)


def _profile_shape(profile: Profile) -> dict[str, Any]:
    return with_former_names(asdict(profile), waits="is_pending", asked_at="requested_at")
