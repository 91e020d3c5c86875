"""REST: the scheduler's queue, with Vigil's own jobs in it."""

from datetime import datetime
from typing import Any

from ninja import Query, Router, Schema
from pydantic import Field, field_validator

from jobs.queue import STATES, Entry, QueueSearch, described, unseen
from nodes import inventory
from nodes.api import ReadingShape
from nodes.models import Reading
from portal.api import ApiRequest, Cursor, Limit, Text, bad_field
from portal.paging import BadCursor

router = Router(tags=["cluster"])


class QueuedShape(Schema):
    """A job of the scheduler that waits or runs, whoever's it is."""

    scheduler_id: str
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
    memory_mib: int
    gpu_indices: dict[str, list[int]] = Field(description="By node.")
    tasks: int = Field(description="How many jobs wait in this row: those of an array are one row.")
    reservation: str
    features: str
    dependency: str
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
    state: list[str] = Field([], description=f"Any of {', '.join(STATES)}.")
    partition: Text = ""
    user: Text = Field("", description="A Unix user.")
    mine: bool = False
    limit: Limit
    cursor: Cursor

    @field_validator("state")
    @classmethod
    def _known_states(cls, states: list[str]) -> list[str]:
        for state in states:
            if state not in STATES:
                raise ValueError(f"{state[:40]!r} is not a state. Take one of {', '.join(STATES)}.")
        return states


@router.get("/queue", response=Queue, summary="The scheduler's queue: your own first, then by priority")
def queue(request: ApiRequest, wanted: Query[WantedQueue]) -> dict[str, Any]:
    search = QueueSearch(
        text=wanted.q, states=wanted.state, partition=wanted.partition, user=wanted.user, mine=wanted.mine
    )
    try:
        found = search.page(request.auth, cursor=wanted.cursor, limit=wanted.limit)
    except BadCursor as error:
        raise bad_field("cursor", str(error)) from error
    return {
        "items": [queued_shape(entry) for entry in described(request.auth, found.items)],
        "next": found.next,
        "counts": search.counts(request.auth),
        "reading": inventory.readings()[Reading.Part.QUEUE],
        "unseen": unseen(request.auth),
    }


_SAME = tuple(
    name
    for name in QueuedShape.model_fields
    if name not in {"job", "name", "user", "sweep", "is_mine", "why", "position", "waiting"}
)


def queued_shape(entry: Entry) -> dict[str, Any]:
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
