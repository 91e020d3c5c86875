"""REST: follow a job that was submitted to Slurm outside Vigil."""

from typing import Annotated, Any

from django.http import HttpResponse
from ninja import Router, Schema, Status
from pydantic import Field, StringConstraints

from jobs.api.jobs import LongText, Name, TagName
from jobs.api.request import job_of
from jobs.api.shapes import JobShape, job_shape
from jobs.disk import tokens
from jobs.submitting import attaching
from portal.http.api import ApiRequest
from portal.http.openapi import described

router = Router(tags=["jobs"])
Number = Annotated[str, StringConstraints(pattern=r"^[1-9][0-9]{0,9}(_[0-9]{1,9})?$")]
SingleLine = Annotated[str, StringConstraints(max_length=4096, pattern=r"^[^\x00-\x1f]*$")]


class AttachmentRequest(Schema):
    """A Slurm job to follow, and its name and labels in Vigil."""

    model_config = {"extra": "forbid", "strict": True}
    scheduler_id: Number = Field(description="Slurm's job id; for an array task such as 17_3.")
    restart_count: int | None = Field(
        None,
        ge=0,
        lt=2**31,
        description="SLURM_RESTART_COUNT, if the job's own script attaches it: each run is an attempt.",
    )
    reports: bool = Field(False, description="Return a token with which the job can report.")
    name: Name | None = Field(None, description="Default: the job's name in Slurm.")
    project: str = Field("", max_length=64, pattern=r"^[^\x00]*$", description="Default: `default`, or your only one.")
    tags: list[TagName] = Field([], max_length=50)
    notes: LongText = ""
    directory: SingleLine = Field("", description="Working directory, shown on its page.")
    command: SingleLine = Field("", description="Command, shown on its page.")


class Reporting(Schema):
    """The identifiers and token that the run needs in order to report."""

    attempt: int
    number: int
    scheduler_id: str
    restart_count: int
    token: str = Field(
        description="Valid for this attempt only, until it closes. Repeated requests return the same token."
    )


class AttachedShape(Schema):
    job: JobShape
    reports: Reporting | None


@router.post(
    "/attach",
    response={200: AttachedShape, 201: AttachedShape},
    summary="Follow your Slurm job",
    openapi_extra=described(
        errors={
            403: "The job is not yours, or the token is read-only.",
            409: "Vigil does not know yet that the job was requeued: try again in a moment.",
        }
    ),
)
def attach(request: ApiRequest, response: HttpResponse, body: AttachmentRequest) -> Status[dict[str, Any]]:
    """Follow a job that was started by sbatch. 200 means that it is already followed.

    Whether it is yours is checked with Slurm within seconds; if not, the attempt ends as failed with that reason.
    409 means
    that Vigil does not know yet that the job was requeued; try again.
    """
    claim = body.model_dump(exclude={"reports", "tags", "name"})
    attached = attaching.attach(
        request.auth, attaching.AttachClaim(**claim, name=body.name or "", tags=tuple(body.tags))
    )
    attempt = attached.attempt
    reports = None
    if body.reports:
        reports = {
            "attempt": attempt.pk,
            "number": attempt.number,
            "scheduler_id": attempt.scheduler_id,
            "restart_count": attempt.scheduler_restart_count,
            "token": tokens.token_of_attached(attempt),
        }
    response.headers["Location"] = f"/api/v1/jobs/{attempt.job_id}"
    shown = job_shape(job_of(request, attempt.job_id))
    return Status(201 if attached.created else 200, {"job": shown, "reports": reports})
