"""REST: how much disk the projects use."""

from datetime import datetime

from ninja import Router, Schema
from pydantic import Field

from jobs import disk
from portal.api import ApiRequest

router = Router(tags=["projects"])


class UseShape(Schema):
    project: str
    jobs: int
    bytes: int = Field(description="Of their run directories, as measured; a job's size follows within minutes.")
    checkpoint_bytes: int = Field(description="Of the checkpoints that there are, as their trainers told.")
    unmeasured: int = Field(description="Jobs that are not in `bytes` yet.")
    partial: int = Field(description="Jobs that hold more than was counted.")
    oldest_job_at: datetime | None
    measured_at: datetime | None = Field(description="The oldest measurement in `bytes`.")


class Uses(Schema):
    items: list[UseShape]
    next: str | None = None


@router.get("/disk", response=Uses, summary="Disk use of projects that you lead, the largest first")
def use(request: ApiRequest) -> dict[str, object]:
    names = [name for name in UseShape.model_fields if name != "project"]
    found = disk.use_of(request.auth)
    return {"items": [{"project": u.project.slug, **{name: getattr(u, name) for name in names}} for u in found]}
