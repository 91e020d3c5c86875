"""REST: the scheduler's queue, including Vigil's jobs."""

from datetime import datetime
from typing import Annotated, Any

from ninja import Query, Router, Schema
from pydantic import Field

from jobs.listing.queue import STATES, QueueEntry, QueueSearch, describe_rows, unseen
from nodes.api.nodes import ReadingShape
from nodes.cluster import sync
from nodes.models import Reading
from portal.http.api import ApiRequest, Cursor, Limit, Text, among

router = Router(tags=["cluster"])


class QueuedShape(Schema):
    """A pending or running job of the scheduler, of any user."""

    scheduler_id: str
    component: str = Field(description='"85+1" of heterogeneous job 85, as Slurm writes it; empty of every other job.')
    job: int | None = Field(description="Vigil's number, where it is a job of Vigil's that you can see.")
    sweep: int | None = Field(description="Vigil's number of the sweep whose array it is, where you can see it.")
    name: str
    user: str
    is_mine: bool
    state: str
    account: str
    partition: str
    qos: str
    reason: str = Field(description="The scheduler's word.")
    why: str = Field(description="The same in plain words.")
    priority: int
    position: int | None = Field(description="Of those that wait in its partition, by priority; 1 is next.")
    waiting: int = Field(description="How many wait in its partition, held ones left aside.")
    submitted_at: datetime | None
    started_at: datetime | None
    starts_at: datetime | None = Field(description="The scheduler's own guess for one that waits.")
    ends_at: datetime | None
    time_limit_s: int | None
    nodes: list[str]
    node_count: int
    cpus: int
    gpus: int
    gpu_type: str
    gpus_by_type: dict[str, int] = Field(description="Where it asks for several types; empty otherwise.")
    memory_mib: int
    gpu_indices: dict[str, list[int]] = Field(description="By node.")
    tasks: int = Field(description="How many jobs wait in this row: those of an array are one row.")
    reservation: str
    features: str
    dependency: str
    licenses: str = Field(description='As Slurm writes them: "matlab:2,abaqus".')
    restart_count: int
    is_made_up: bool


class UnseenShape(Schema):
    """Your own jobs that the queue cannot show yet."""

    kept: int = Field(description="Vigil has not handed them to the scheduler yet.")
    newer: int = Field(description="Handed over since the queue was read.")
    text: str = Field(description="The same in a sentence; empty where the queue shows all.")


class Queue(Schema):
    items: list[QueuedShape]
    next: str | None
    counts: dict[str, int] = Field(description="Jobs by state, the filter of states left aside.")
    reading: ReadingShape
    unseen: UnseenShape


class WantedQueue(Schema):
    """Filters of the queue; repeat `state` for several."""

    q: Text = Field("", description="Words in the name, or a scheduler's id, a person, an account.")
    state: Annotated[list[str], among(STATES, "a state")] = Field([], description=f"Any of {', '.join(STATES)}.")
    partition: Text = ""
    user: Text = Field("", description="A Unix user.")
    mine: bool = False
    limit: Limit
    cursor: Cursor


@router.get("/queue", response=Queue, summary="The scheduler's queue: your own first, then by priority")
def queue(request: ApiRequest, wanted: Query[WantedQueue]) -> dict[str, Any]:
    """Return the queue as the scheduler last reported it, with everybody's jobs if the site shows them."""
    search = QueueSearch(
        text=wanted.q, states=wanted.state, partition=wanted.partition, user=wanted.user, mine=wanted.mine
    )
    found = search.page(request.auth, cursor=wanted.cursor, limit=wanted.limit)
    return {
        "items": [queued_shape(entry) for entry in describe_rows(request.auth, found.items)],
        "next": found.next,
        "counts": search.counts(request.auth),
        "reading": sync.readings()[Reading.Part.QUEUE],
        "unseen": unseen(request.auth),
    }


_SAME = tuple(
    name
    for name in QueuedShape.model_fields
    if name not in {"job", "name", "user", "sweep", "is_mine", "why", "position", "waiting"}
)


def queued_shape(entry: QueueEntry) -> dict[str, Any]:
    return {name: getattr(entry.row, name) for name in _SAME} | {
        "job": entry.job.pk if entry.job else None,
        "sweep": entry.sweep.pk if entry.sweep else None,
        "name": entry.name,
        "user": entry.user,
        "is_mine": entry.is_mine,
        "why": entry.why,
        "position": entry.position,
        "waiting": entry.of,
    }
