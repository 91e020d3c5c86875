"""REST: disk use of projects, and how long they keep checkpoints."""

from datetime import datetime
from typing import Annotated

from ninja import Router, Schema
from pydantic import Field, StringConstraints

from jobs.disk import retention, usage
from portal.access import can
from portal.http.api import ApiRequest
from portal.http.openapi import described
from portal.http.problems import Problem
from portal.models import Project

router = Router(tags=["projects"])
Slug = Annotated[str, StringConstraints(max_length=64, pattern=r"^[^\x00]*$")]


class UseShape(Schema):
    project: str
    jobs: int
    bytes: int = Field(description="Size of their run directories; updated within minutes.")
    keep_checkpoints_days: int | None = Field(description="Null: checkpoints stay as long as their job.")
    checkpoint_bytes: int = Field(
        description="Size of checkpoints as reported by trainers; more than `bytes` if some were deleted since."
    )
    unmeasured: int = Field(description="Number of jobs not yet included in `bytes`.")
    partial: int = Field(description="Number of jobs that use more than could be counted.")
    oldest_job_at: datetime | None
    measured_at: datetime | None = Field(description="The oldest measurement in `bytes`.")


class Retention(Schema):
    model_config = {"extra": "forbid"}
    keep_checkpoints_days: Annotated[int, Field(ge=1, le=3650)] | None = Field(
        description="Days after a job's end until all but its last checkpoint are deleted; null: never."
    )


class Uses(Schema):
    items: list[UseShape]
    next: str | None = None


@router.get("/disk", response=Uses, summary="Disk use of projects that you lead, largest first")
def use(request: ApiRequest) -> dict[str, object]:
    """Return sizes of run directories as last measured; sysadmins see every project."""
    names = [name for name in UseShape.model_fields if name != "project"]
    found = usage.disk_use(request.auth)
    return {"items": [{"project": u.project.slug, **{name: getattr(u, name) for name in names}} for u in found]}


@router.patch(
    "/{slug}",
    response=Retention,
    summary="Set how long a project keeps checkpoints",
    openapi_extra=described(
        errors={
            403: "You do not lead this project, or the token is read-only.",
            404: "No such project that you can see.",
        }
    ),
)
def change(request: ApiRequest, slug: Slug, body: Retention) -> Project:
    """Set after how many days a job that has ended keeps only its last checkpoint and pinned ones."""
    project = Project.objects.visible_to(request.auth).filter(slug=slug).first()
    if project is None:
        raise Problem(404, f"There is no project {slug} that you can see.")
    if not can(request.auth, "manage", project):
        raise Problem(403, f"Only leads of {slug} can change this. Ask one of them.", kind="refused")
    retention.set_retention(request.auth, project, body.keep_checkpoints_days)
    return Project.objects.get(pk=project.pk)
