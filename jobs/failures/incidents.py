"""An incident as a failure that is counted: whose, of which program, what it cost, how long until it trained again."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from jobs import starts
from jobs.failures.counted import MACHINES, NOT_FAILURES, PROGRAMS, UNDIAGNOSED
from jobs.incarnations import STARTED, number_of
from jobs.intake.reports import owner_of
from jobs.models import Attempt, Checkpoint, Event, Incident
from jobs.reliability.held import whole
from portal.series import read

SETTLED_AFTER = timedelta(days=2)
SERIES = ("step_seconds", "loss")
"""Of which the newest point tells when there was progress last."""
_AGAIN = (Attempt.Origin.RESTARTED, Attempt.Origin.REQUEUED)


@dataclass(frozen=True)
class _Course:
    """What came before and after it."""

    lost_s: float
    detect_s: float | None
    recover_s: float | None
    went_on: bool
    is_over: bool


def fields_of(incident: Incident, default_partition: str, now: datetime) -> dict[str, Any] | None:
    """What its failure says; None where nothing failed after all."""
    cause = incident.overruled_cause or incident.cause
    if cause in NOT_FAILURES:
        return None
    attempt, job = incident.attempt, incident.attempt.job
    resources = job.spec.get("resources") or {}
    course = _course(incident)
    lost_node_s = course.lost_s * max(1, len(attempt.nodes))
    struck = cause in MACHINES or cause in UNDIAGNOSED
    return {
        "at": incident.at,
        "day": incident.at.astimezone(UTC).date(),
        "project_id": job.project_id,
        "partition": resources.get("partition") or default_partition,
        "node": incident.node or (attempt.nodes[0] if len(attempt.nodes) == 1 else ""),
        "cause": cause,
        "program": _program(incident, cause),
        "is_interruption": struck or course.went_on,
        "lost_node_s": lost_node_s,
        "lost_gpu_s": lost_node_s * whole(resources.get("gpus_per_node")),
        "detect_s": course.detect_s,
        "recover_s": course.recover_s,
        "is_settled": (incident.is_final and course.is_over) or now - incident.at > SETTLED_AFTER,
    }


def _program(incident: Incident, cause: str) -> str:
    """What is the same when the same program fails again: its fingerprint, where it is the program that failed.

    A GPU that falls off the bus says the same under every job: there each job, or sweep, is a program of its own.
    """
    if cause in PROGRAMS and incident.fingerprint:
        return f"print {incident.fingerprint}"
    job = incident.attempt.job
    return f"sweep {job.sweep_id}" if job.sweep_id else f"job {job.pk}"


def _course(incident: Incident) -> _Course:
    attempt, at = incident.attempt, incident.at
    began = _began(incident)
    following = None if incident.incarnation is not None else _following(attempt)
    again = _again(incident, following)
    kept = following.resume_from if following else _newest(attempt, at)
    since = max(began, min(kept.created_at, at)) if kept else began
    held_s = _held_until(incident, following, again)
    last = _last_step(attempt, incident.incarnation)
    return _Course(
        lost_s=max(0.0, (at - since).total_seconds()) + held_s,
        detect_s=max(0.0, at.timestamp() - last) if last is not None else None,
        recover_s=max(0.0, (again - at).total_seconds()) if again else None,
        went_on=incident.incarnation is not None or following is not None,
        is_over=_is_over(incident, following, again),
    )


def _began(incident: Incident) -> datetime:
    """When what failed was begun: the attempt, or of a restart in place that incarnation."""
    attempt = incident.attempt
    began = attempt.started_at or incident.at
    if incident.incarnation:
        started = Event.objects.filter(attempt=attempt, kind=STARTED).order_by("-id")[:200]
        own = [one.time for one in started if number_of(one.data) == incident.incarnation]
        began = own[0] if own else began
    return min(began, incident.at)


def _following(attempt: Attempt) -> Attempt | None:
    """The attempt that went on without anybody asking."""
    rows = Attempt.objects.filter(job_id=attempt.job_id, number=attempt.number + 1, origin__in=_AGAIN)
    return rows.select_related("resume_from").first()


def _again(incident: Incident, following: Attempt | None) -> datetime | None:
    """When ranks trained again."""
    if incident.incarnation is None and following is None:
        return None
    attempt = following or incident.attempt
    told = Event.objects.filter(attempt=attempt, kind=starts.kind_of(incident.attempt.job)).order_by("id")
    if following is None and incident.incarnation is not None:
        after = [one for one in told.filter(time__gt=incident.at)[:50] if _number(one) > incident.incarnation]
        return after[0].time if after else None
    first = told.first()
    return first.time if first else None


def _number(event: Event) -> int:
    return event.incarnation if event.incarnation is not None else number_of(event.data)


def _newest(attempt: Attempt, at: datetime) -> Checkpoint | None:
    """The checkpoint that a resume would start from."""
    saved = Checkpoint.objects.filter(job_id=attempt.job_id, attempt__number__lte=attempt.number, created_at__lte=at)
    return saved.exclude(state=Checkpoint.State.CORRUPT).order_by("-created_at").first()


def _held_until(incident: Incident, following: Attempt | None, again: datetime | None) -> float:
    """Seconds that nodes were held before they trained again; the queue is not counted."""
    held_since = following.started_at if following else incident.at
    if again is None or held_since is None:
        return 0.0
    return max(0.0, (again - held_since).total_seconds())


def _last_step(attempt: Attempt, incarnation: int | None) -> float | None:
    """When the last step was done that rank 0 told of, of this incarnation or of any; Unix seconds."""
    owners = [owner_of(attempt.pk)]
    for name in SERIES:
        ids = read.ids_of(owners, name)
        reading = read.Reading(owners, name, ids)
        known = [place for place, (_, one) in enumerate(reading.look()) if incarnation in (None, one)]
        if not known:
            continue
        newest = reading.curve(2, only=known[-1]).last_step
        if newest is not None:
            exact = read.Reading(owners, name, ids, start=newest)
            points = [exact.curve(None, only=place) for place in range(len(exact.look()))]
            times = [float(one.time[-1]) for one in points if len(one.time) and one.last_step == newest]
            return max(times, default=None)
    return None


def _is_over(incident: Incident, following: Attempt | None, again: datetime | None) -> bool:
    if incident.incarnation is not None:
        return again is not None or incident.attempt.ended_at is not None
    if following is None:
        return incident.attempt.closed_at is not None and incident.attempt.decided_at is not None
    return again is not None or following.ended_at is not None
