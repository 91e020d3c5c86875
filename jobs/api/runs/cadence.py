"""REST: how often a job saves, and how often it should."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any

from ninja import Router, Schema, Status
from pydantic import Field

from jobs.api.request import NOT_YOURS, job_of
from jobs.gathering import cadence as gathering
from jobs.gathering import job_life as lives
from jobs.gathering.cadence import SaveCadence
from jobs.presenting.job_page import cadence as words
from jobs.submitting import cadence as ordering
from portal.http.api import ApiRequest
from portal.http.openapi import deprecated, described, with_former_names
from portal.http.problems import Problem
from vigil_core import formatting

router = Router(tags=["jobs"])


class CadenceOrderShape(Schema):
    """A change that applies to attempts submitted after it was made, whatever the specification says."""

    every: int = Field(description="Steps (rounds in a federated job) from one save to the next.")
    from_attempt: int = Field(description="The first attempt with this interval.")
    requested_by: str | None
    requested_at: datetime
    asked_by: str | None = deprecated("requested_by")
    asked_at: datetime = deprecated("requested_at")


class CadenceShape(Schema):
    """Intervals are in seconds, from the start of one save to the start of the next."""

    is_automatic: bool = Field(description="checkpoint_every = auto: the interval is chosen automatically.")
    cost_seconds: float = Field(description="Measured cost of a save, including all its consequences.")
    interval_seconds: float | None = Field(description="Null: it saves only at the end.")
    best_interval_seconds: float
    best_every: int | None = Field(description="The same in steps or rounds; null: the duration of a step is unknown.")
    mtbf_seconds: float = Field(description="Mean time between failures of all its nodes together.")
    mtbf_source: str = Field(description="config, seen or assumed.")
    gain: float = Field(description="Share of time that the best interval would save.")
    gpu_hours_a_day: float = Field(description="Cost of the difference to the best interval.")
    gpu_hours_left: float | None = Field(description="The same for the rest of the run.")
    order: CadenceOrderShape | None
    text: str


class CadenceChange(Schema):
    model_config = {"extra": "forbid", "strict": True}
    every: Annotated[int, Field(ge=1, le=ordering.MAX_EVERY)] | None = Field(
        description="Steps or rounds from one save to the next, for attempts not yet submitted to the "
        "scheduler; null: the specification's interval."
    )


@router.get(
    "/{int:job_id}/cadence",
    response=CadenceShape,
    summary="How often a job saves, and how often it should",
    openapi_extra=described(errors={404: "No such job that you can see, or it has not measured a save yet."}),
)
def cadence(request: ApiRequest, job_id: int) -> dict[str, Any]:
    """Return the cadence, from the trainer's measurements of its saves and the observed failure rate of its nodes."""
    job = job_of(request, job_id)
    found = gathering.measure(lives.load(job))
    if found is None:
        raise Problem(404, f"#{job.pk} has not measured a save yet. Its trainer reports it after the first saves.")
    return _cadence_shape(found)


@router.put(
    "/{int:job_id}/cadence",
    response={204: None},
    summary="Save more or less often from the next attempt on",
    openapi_extra=described(errors={403: NOT_YOURS, 409: "The job runs its own program, which decides when to save."}),
)
def order_cadence(request: ApiRequest, job_id: int, change: CadenceChange) -> Status[None]:
    """Change the interval for future attempts. Running and queued attempts keep theirs."""
    ordering.set_cadence(request.auth, job_of(request, job_id), change.every)
    return Status(204, None)


def _cadence_shape(found: SaveCadence) -> dict[str, Any]:
    return {
        "is_automatic": found.is_automatic,
        "cost_seconds": found.cost_s,
        "interval_seconds": found.present_s,
        "best_interval_seconds": found.best_s,
        "best_every": found.best_every,
        "mtbf_seconds": found.mtbf_s,
        "mtbf_source": found.source,
        "gain": found.gain,
        "gpu_hours_a_day": found.gpu_hours_a_day,
        "gpu_hours_left": found.gpu_hours_left,
        "order": _order_shape(found),
        "text": formatting.plain_spaces(" ".join(words.summary(found))),
    }


def _order_shape(found: SaveCadence) -> dict[str, Any] | None:
    order = found.order
    if order is None:
        return None
    username = order.asked_by.username if order.asked_by else None
    origin = {"requested_by": username, "requested_at": order.asked_at}
    shown = {"every": order.every, "from_attempt": found.from_attempt, **origin}
    return with_former_names(shown, asked_by="requested_by", asked_at="requested_at")
