"""REST: the scheduler's queue, including Vigil's jobs."""

from dataclasses import asdict
from datetime import datetime
from typing import Annotated, Any

from ninja import Query, Router, Schema
from pydantic import Field

from jobs.listing.queue import STATES, QueueEntry, QueueSearch, describe_rows, unseen_jobs
from nodes.api.nodes import ReadingShape
from nodes.cluster import sync
from nodes.models import Reading
from portal.http.api import ApiRequest, Cursor, Limit, Text, one_of
from portal.http.openapi import deprecated, with_former_names

router = Router(tags=["cluster"])


class QueuedShape(Schema):
    """A pending or running job of the scheduler, of any user."""

    scheduler_id: str
    component: str = Field(description='"85+1" for a component of heterogeneous job 85, as in Slurm; else empty.')
    job: int | None = Field(description="Vigil's job number, if it is a Vigil job that you can see.")
    sweep: int | None = Field(description="Vigil's number of the sweep that submitted this array, if you can see it.")
    name: str
    user: str
    is_mine: bool
    state: str
    account: str
    partition: str
    qos: str
    reason: str = Field(description="The scheduler's reason.")
    why: str = Field(description="The reason, explained.")
    priority: int
    position: int | None = Field(description="Position among pending jobs of its partition, by priority; 1 is next.")
    waiting: int = Field(description="Number of pending jobs in its partition, without held ones.")
    submitted_at: datetime | None
    started_at: datetime | None
    starts_at: datetime | None = Field(description="The scheduler's estimate for a pending job.")
    ends_at: datetime | None
    time_limit_s: int | None
    nodes: list[str]
    node_count: int
    cpus: int
    gpus: int
    gpu_type: str
    gpus_by_type: dict[str, int] = Field(description="If it requests several types; else empty.")
    memory_mib: int
    gpu_indices: dict[str, list[int]] = Field(description="By node.")
    tasks: int = Field(description="Number of jobs in this row: pending jobs of an array are one row.")
    reservation: str
    features: str
    dependency: str
    licenses: str = Field(description='As Slurm writes them: "matlab:2,abaqus".')
    restart_count: int
    is_made_up: bool


class UnseenShape(Schema):
    """Your own jobs that the queue cannot show yet."""

    unsubmitted: int = Field(description="Not submitted to the scheduler yet.")
    kept: int = deprecated("unsubmitted")
    newer: int = Field(description="Submitted since the queue was last read.")
    text: str = Field(description="The same in a sentence; empty if the queue shows all jobs.")


class Queue(Schema):
    items: list[QueuedShape]
    next: str | None
    counts: dict[str, int] = Field(description="Number of jobs by state, ignoring the filter on states.")
    reading: ReadingShape
    unseen: UnseenShape


class QueueQuery(Schema):
    """Filters of the queue; repeat `state` for several."""

    q: Text = Field("", description="Words in the name, or a scheduler's id, user or account.")
    state: Annotated[list[str], one_of(STATES, "a state")] = Field([], description=f"Any of {', '.join(STATES)}.")
    partition: Text = ""
    user: Text = Field("", description="A Unix user.")
    mine: bool = False
    limit: Limit
    cursor: Cursor


@router.get("/queue", response=Queue, summary="The scheduler's queue: your jobs first, then by priority")
def queue(request: ApiRequest, query: Query[QueueQuery]) -> dict[str, Any]:
    """Return the queue as the scheduler last reported it, with everybody's jobs if the site shows them."""
    search = QueueSearch(text=query.q, states=query.state, partition=query.partition, user=query.user, mine=query.mine)
    results = search.page(request.auth, cursor=query.cursor, limit=query.limit)
    unseen = unseen_jobs(request.auth)
    return {
        "items": [queued_shape(entry) for entry in describe_rows(request.auth, results.items)],
        "next": results.next,
        "counts": search.counts(request.auth),
        "reading": sync.readings()[Reading.Part.QUEUE],
        "unseen": with_former_names(asdict(unseen), kept="unsubmitted") | {"text": unseen.text},
    }


_ROW_FIELDS = tuple(
    name
    for name in QueuedShape.model_fields
    if name not in {"job", "name", "user", "sweep", "is_mine", "why", "position", "waiting"}
)


def queued_shape(entry: QueueEntry) -> dict[str, Any]:
    return {name: getattr(entry.row, name) for name in _ROW_FIELDS} | {
        "job": entry.job.pk if entry.job else None,
        "sweep": entry.sweep.pk if entry.sweep else None,
        "name": entry.name,
        "user": entry.user,
        "is_mine": entry.is_mine,
        "why": entry.why,
        "position": entry.position,
        "waiting": entry.of,
    }
