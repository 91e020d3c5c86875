"""REST: the checkpoints of a job, listed and pinned."""

from typing import Any

from ninja import Query, Router, Schema
from pydantic import Field

from jobs.api.request import NOT_YOURS, job_of
from jobs.api.shapes import CheckpointPage, CheckpointShape, checkpoint_shape
from jobs.submitting import submit as lifecycle
from portal.http.api import ApiRequest, PageQuery, shaped_page
from portal.http.openapi import described
from portal.http.paging import SortOrder
from portal.http.problems import Problem
from vigil_core.untrusted import plain

router = Router(tags=["jobs"])


class Pinning(Schema):
    model_config = {"extra": "forbid", "strict": True}
    pinned: bool = Field(description="Protect it from pruning by the trainer and by the project's retention.")


@router.get(
    "/{int:job_id}/checkpoints",
    response=CheckpointPage,
    summary="A job's checkpoints, newest step first",
    operation_id="jobs_api_jobs_checkpoints",  # generated clients know it by this name
)
def checkpoints(request: ApiRequest, job_id: int, query: Query[PageQuery]) -> dict[str, Any]:
    """Return the checkpoints on disk and past ones, each with its state."""
    found = job_of(request, job_id).checkpoints.select_related("attempt")
    return shaped_page(found, SortOrder("step", descending=True), query, checkpoint_shape)


@router.patch(
    "/{int:job_id}/checkpoints/{str:name}",
    response=CheckpointShape,
    summary="Pin or unpin a checkpoint",
    operation_id="jobs_api_jobs_pin",  # generated clients know it by this name
    openapi_extra=described(
        errors={
            403: NOT_YOURS,
            404: "No such job that you can see, or no such checkpoint.",
            409: "The checkpoint no longer exists.",
        }
    ),
)
def pin(request: ApiRequest, job_id: int, name: str, body: Pinning) -> dict[str, Any]:
    """Pin or unpin a checkpoint. A pinned checkpoint stays until the job is deleted.

    `name` is as in the list, such as step-400; step-400.g2 always means the one that generation 2 wrote.
    """
    job = job_of(request, job_id, "change")
    checkpoint = job.checkpoints.by_name(plain(name)).first()
    if checkpoint is None:
        raise Problem(404, f"#{job_id} has no checkpoint {name[:80]}.")
    lifecycle.pin(request.auth, job, checkpoint, pinned=body.pinned)
    return checkpoint_shape(job.checkpoints.select_related("attempt").get(pk=checkpoint.pk))
