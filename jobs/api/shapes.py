"""The schemas of the API's responses about jobs, and functions that fill them from database rows."""

from __future__ import annotations

from dataclasses import asdict
from datetime import datetime
from typing import Any, Literal

from django.conf import settings
from django.utils import timezone
from ninja import Schema
from pydantic import Field

from jobs.coverage import coverage_of, sentence_of
from jobs.disk import missing
from jobs.goodput import goodput
from jobs.models import Attempt, Checkpoint, Event, Job
from jobs.progress import progress
from jobs.waiting import reasons
from portal.http.openapi import deprecated
from training.federation.outline import NAMED

Values = dict[str, float | str | None]


class AttemptShape(Schema):
    id: int
    number: int
    state: str = Field(description="Slurm's state, lower-case.")
    reason: str = Field(description="Why it waits or ended, in the scheduler's words or Vigil's.")
    explained: str = Field(description="Why it waits or ended, as explained on its page.")
    scheduler_id: str
    nodes: list[str]
    exit_code: int | None
    signal: int | None
    cause: str = Field(description="Why it ended, as a code.")
    decision: str = Field(description="What Vigil decided after its end.")
    excluded_nodes: list[str] = Field(description="Nodes to avoid, because earlier attempts failed there.")
    failure: dict[str, Any] = Field(description="The first failure, as its launcher saw it.")
    resume_from: int | None = Field(description="Id of the checkpoint it started from.")
    step: int | None
    steps: int | None
    phase: str
    incarnation: int
    created_at: datetime
    submitted_at: datetime | None
    started_at: datetime | None
    ended_at: datetime | None
    cancel_requested_at: datetime | None = Field(description="When a cancellation was requested.")
    cancel_asked_at: datetime | None = deprecated("cancel_requested_at")
    release_outcome: str = Field(description="Why a held job was not released; empty: not requested, or released.")
    kill_requested_at: datetime | None = Field(description="When a kill was requested.")
    decided_at: datetime | None = Field(description="When Vigil decided whether another attempt follows.")


class SlurmStepShape(Schema):
    """A `srun` of an attempt, its batch script or an external step, according to Slurm's accounting."""

    number: str = Field(description="batch, extern, interactive, 0, 1 …")
    name: str
    state: str
    exit_code: int | None
    signal: int | None
    nodes: list[str]
    started_at: float | None = Field(description="Unix seconds.")
    ended_at: float | None


class AttemptDetail(AttemptShape):
    resumed_from_step: int | None = Field(description="Step of the checkpoint it started from; null: the beginning.")
    resumed_from_checkpoint: str = Field(description="Folder name of that checkpoint; empty: none.")
    slurm_steps: list[SlurmStepShape] = Field(description="Available once Slurm's accounting has them, after the end.")


class ProgressShape(Schema):
    step: int | None
    steps: int | None
    fraction: float | None
    eta_seconds: float | None


class PlaceShape(Schema):
    """A job's place in its sweep."""

    id: int = Field(description="Id of the sweep.")
    index: int = Field(description="Index in the sweep, from 0.")
    values: dict[str, Any] = Field(description="Values of the varied fields, by path.")


class JobShape(Schema):
    id: int
    name: str
    kind: str
    project: str
    owner: str
    state: str = Field(description="Its latest attempt's.")
    reason: str = Field(description="Its latest attempt's.")
    explained: str = Field(description="Why it waits or ended, as explained on its page.")
    attempt: AttemptShape | None = Field(description="The latest.")
    progress: ProgressShape
    latest: Values = Field(description="Newest values of rank 0.")
    tags: list[str]
    notes: str
    created_at: datetime
    started_at: datetime | None
    ended_at: datetime | None
    over: bool = Field(description="The job has ended, and Vigil will not restart it.")
    parent: int | None = Field(description="The job it was cloned from.")
    sweep: PlaceShape | None = Field(description="If the job belongs to a sweep: which one, and with which values.")
    url: str


class GoodputShape(Schema):
    fraction: float = Field(description="useful_seconds over wall_seconds.")
    useful_seconds: float = Field(description="Time of useful steps: each counted once, without lost ones.")
    wall_seconds: float = Field(description="Time for which nodes were allocated.")


class CoverageShape(Schema):
    """The part of a federation's clients and data that has not contributed to any round so far."""

    clients: int
    never: int = Field(description="Clients whose updates were used in no round.")
    excluded: int = Field(description="Of these, those that were selected in some round.")
    samples: int
    never_samples: int = Field(description="Samples of clients that were never used.")
    foremost: list[int] = Field(description="Some of these clients, most samples first.")
    text: str = Field(description="The same in a sentence; empty if all were used, and before round 5.")


class JobDetail(JobShape):
    coverage: CoverageShape | None = Field(description="For a federation, once its server has reported it.")
    goodput: GoodputShape | None = Field(description="Null: the job reports no steps, or has not run yet.")
    spec: dict[str, Any]
    spec_toml: str
    directory: str = Field(description="Run directory, once it exists.")


class SpecShape(Schema):
    spec: dict[str, Any]
    spec_toml: str
    parent: int | None


class CheckpointShape(Schema):
    id: int
    step: int
    name: str
    generation: int
    state: str
    problem: str
    resumable: bool
    bytes: int
    seconds: float | None
    parent_step: int | None
    consumed_samples: int | None
    world_size: int | None
    attempt: int = Field(description="Number of the attempt that wrote it.")
    pinned: bool
    created_at: datetime


class EventShape(Schema):
    id: int
    attempt: int = Field(description="The attempt's number.")
    time: datetime
    kind: str
    rank: int | None
    incarnation: int | None
    data: dict[str, Any]


class FindingShape(Schema):
    level: Literal["ok", "info", "warn", "error"]
    title: str
    text: str


class SpreadShape(Schema):
    """The distribution over all clients."""

    min: float
    q25: float
    median: float
    q75: float
    max: float


class ShareShape(Schema):
    number: int
    name: str = Field(description="Owner of its data; empty: unknown.")
    samples: int = Field(description="Training samples.")
    split: list[int] = Field(description="Training samples by label, in the order of `labels`.")


class RestShape(Schema):
    """The clients that `items` does not list, combined."""

    clients: int
    samples: int
    split: list[int]


class OutlineShape(Schema):
    """The planned split of a federation's data among its clients."""

    clients: int
    samples: int
    labels: list[str]
    spreads: dict[str, SpreadShape] = Field(
        description="`samples`, number of `labels` per client, and `commonest_share`: the share of a client's samples "
        "with its most common label."
    )
    items: list[ShareShape] = Field(description=f"At most {NAMED:,} clients, by number.")
    rest: RestShape | None = Field(description="Null: all are listed.")


class CheckShape(Schema):
    spec: dict[str, Any] = Field(description="The spec with every default filled in.")
    spec_toml: str
    findings: list[FindingShape]
    split: OutlineShape | None = Field(description="Null: not a federation, or its data are only known to its clients.")


class Jobs(Schema):
    items: list[JobShape]
    next: str | None


class Attempts(Schema):
    items: list[AttemptDetail]
    next: str | None = None


class CheckpointPage(Schema):
    items: list[CheckpointShape]
    next: str | None = None


class Events(Schema):
    items: list[EventShape]
    next: str | None


_ATTEMPT = [
    name for name in AttemptShape.model_fields if name not in {"resume_from", "explained", "cancel_requested_at"}
]
_CHECKPOINT = [name for name in CheckpointShape.model_fields if name != "attempt"]


def attempt_shape(attempt: Attempt) -> dict[str, Any]:
    shown = {name: getattr(attempt, name) for name in _ATTEMPT}
    more = {"cancel_requested_at": attempt.cancel_asked_at, "resume_from": attempt.resume_from_id}
    return {**shown, **more, "explained": reasons.reason_of(attempt)}


def attempt_detail(attempt: Attempt) -> dict[str, Any]:
    start = attempt.resume_from
    return {
        **attempt_shape(attempt),
        "resumed_from_step": start.step if start else None,
        "resumed_from_checkpoint": start.name if start else "",
        "slurm_steps": attempt.slurm_steps,
    }


def job_shape(job: Job) -> dict[str, Any]:
    """Return a job's JSON. Without queries if the job was loaded by `with_latest_attempt()` and has its `tag_names`."""
    latest = job.latest
    return {
        "id": job.pk,
        "name": job.name,
        "kind": job.kind,
        "project": job.project.slug,
        "owner": job.owner.username,
        "state": latest.state if latest else "pending",
        "reason": latest.reason if latest else "",
        "explained": reasons.reason_of(latest) if latest else "",
        "attempt": attempt_shape(latest) if latest else None,
        "progress": asdict(progress(latest)),
        "latest": latest.latest if latest else {},
        "tags": job.tag_names,
        "notes": job.notes,
        "created_at": job.created_at,
        "started_at": latest.started_at if latest else None,
        "ended_at": latest.ended_at if latest else None,
        "over": bool(latest and latest.ended_at and latest.decided_at),
        "parent": job.parent_id,
        "sweep": {"id": job.sweep_id, "index": job.sweep_index, "values": job.sweep_values} if job.sweep_id else None,
        "url": f"{settings.VIGIL_PUBLIC_URL}/jobs/{job.pk}",
    }


def job_detail(job: Job) -> dict[str, Any]:
    directory = str(settings.VIGIL_RUNS / job.directory) if job.directory else ""
    attempts = list(job.attempts.select_related("resume_from").order_by("number"))
    job_goodput = goodput(attempts, timezone.now())
    goodput_shape = {**asdict(job_goodput), "fraction": job_goodput.fraction} if job_goodput else None
    covered = coverage_of(attempts) if job.kind == "federated" else None
    coverage = {**covered.pack(), "text": sentence_of(attempts)} if covered else None
    shown = job_shape(job)
    if job.latest and (gone := missing.problem(job.latest)):
        shown["explained"] = shown["attempt"]["explained"] = gone
    return {
        **shown,
        "coverage": coverage,
        "goodput": goodput_shape,
        "spec": job.spec,
        "spec_toml": job.spec_toml,
        "directory": directory,
    }


def checkpoint_shape(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return a checkpoint's JSON. Its attempt should be loaded."""
    return {**{name: getattr(checkpoint, name) for name in _CHECKPOINT}, "attempt": checkpoint.attempt.number}


def event_shape(event: Event) -> dict[str, Any]:
    """Return an event's JSON. Its attempt should be loaded."""
    names = ("id", "time", "kind", "rank", "incarnation", "data")
    return {**{name: getattr(event, name) for name in names}, "attempt": event.attempt.number}
