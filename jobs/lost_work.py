"""Compute the cost of a bad end: repeated work, nodes allocated until ranks train again, and how long both took.

Each second of allocated nodes counts for one incident at most: the time until ranks train again belongs to the end
before, and if they never did, the work belongs to the next. So the costs of an attempt's incidents add up.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime

from django.db.models import Min

from jobs import starting_steps
from jobs.incarnations import number_of
from jobs.intake.reports import owner_of
from jobs.models import Attempt, Checkpoint, Event, Incident
from portal.series import read

SERIES = ("step_seconds", "loss")
"""The series whose newest points show when there was progress last."""
MAX_STARTS = 1_000
_FOLLOW_UP_ORIGINS = (Attempt.Origin.RESTARTED, Attempt.Origin.REQUEUED)


@dataclass(frozen=True, kw_only=True)
class IncidentTimes:
    """The times around a bad end. None: it did not happen, or is unknown."""

    began_at: datetime
    """When the attempt began."""
    before_at: datetime | None
    """When the previous failure in the same attempt was."""
    trained_at: datetime | None
    """When the failed ranks began to train."""
    resumed_checkpoint_at: datetime | None
    """When the checkpoint was saved from which it resumed."""
    stepped_at: datetime | None
    noticed_at: datetime
    allocated_at: datetime | None
    """Since when nodes were allocated again: at once, or from the start of the next attempt."""
    again_at: datetime | None
    """When ranks trained again."""
    next_at: datetime | None
    """When the next failure was."""

    @property
    def work_s(self) -> float:
        """Return the lost work: since the resumed checkpoint, or since ranks trained, or should have."""
        since = [self.began_at, self.before_at, self.trained_at, self.resumed_checkpoint_at]
        return _seconds(max(at for at in since if at is not None), self.noticed_at) or 0.0

    @property
    def idle_s(self) -> float:
        """Return the time until ranks trained again, without the queue."""
        is_next = self.again_at is not None and self.next_at is not None and self.next_at < self.again_at
        return 0.0 if is_next else _seconds(self.allocated_at, self.again_at) or 0.0

    @property
    def detect_s(self) -> float | None:
        """Return the time from the last step reported by rank 0 until the end was noticed."""
        return _seconds(self.stepped_at, self.noticed_at)

    @property
    def recover_s(self) -> float | None:
        """Return the time from there until ranks trained again, with the queue."""
        return _seconds(self.noticed_at, self.again_at)


@dataclass(frozen=True, kw_only=True)
class LostWork:
    """The cost of an incident. `following`: the attempt that continued by itself; `is_over`: the cost is final."""

    moments: IncidentTimes
    checkpoint: Checkpoint | None
    following: Attempt | None
    node_s: float
    was_continued: bool
    is_over: bool

    @property
    def seconds(self) -> float:
        return self.moments.work_s + self.moments.idle_s


def lost_work(incident: Incident) -> LostWork:
    """Return the cost of one incident, as far as it is known now."""
    attempt, is_end = incident.attempt, incident.incarnation is None
    following = _following(attempt) if is_end else None
    began, again = _training_began(incident), _trained_again(incident, following)
    checkpoint = _resumed_checkpoint(incident, following)
    others = Incident.objects.filter(attempt=attempt).exclude(pk=incident.pk).values_list("at", "pk")
    before = [at for at, pk in others if (at, pk) < (incident.at, incident.pk)]
    after = [at for at, pk in others if (at, pk) > (incident.at, incident.pk)]
    if following is not None:
        after = [at for at in Incident.objects.filter(attempt=following).aggregate(at=Min("at")).values() if at]
    moments = IncidentTimes(
        began_at=attempt.started_at or incident.at,
        before_at=max(before, default=None),
        trained_at=began,
        resumed_checkpoint_at=checkpoint.created_at if checkpoint else None,
        stepped_at=_last_step(attempt, incident.incarnation),
        noticed_at=incident.at,
        allocated_at=incident.at if not is_end else following.started_at if following else None,
        again_at=again,
        next_at=min(after, default=None),
    )
    return LostWork(
        moments=moments,
        checkpoint=checkpoint,
        following=following,
        node_s=moments.work_s * _nodes(attempt) + moments.idle_s * _nodes(following or attempt),
        was_continued=not is_end or following is not None,
        is_over=_is_over(incident, following, again),
    )


def _following(attempt: Attempt) -> Attempt | None:
    """Return the attempt that continued by itself; not one that ended before it ran."""
    rows = Attempt.objects.filter(job_id=attempt.job_id, number=attempt.number + 1, origin__in=_FOLLOW_UP_ORIGINS)
    return rows.exclude(started_at=None, ended_at__isnull=False).select_related("resume_from").first()


def _starts(attempt: Attempt) -> list[tuple[datetime, int]]:
    """Return when ranks began to train, and of which incarnation."""
    events = Event.objects.filter(attempt=attempt, kind=starting_steps.kind_of(attempt.job)).order_by("id")
    rows = events.values_list("time", "incarnation", "data")[:MAX_STARTS]
    return [(at, number_of(data) if incarnation is None else incarnation) for at, incarnation, data in rows]


def _training_began(incident: Incident) -> datetime | None:
    """Return when the ranks that failed began to train; for the end of an attempt the newest incarnation's."""
    began = _starts(incident.attempt)
    which = incident.incarnation if incident.incarnation is not None else max((n for _, n in began), default=0)
    return min((at for at, number in began if number == which and at <= incident.at), default=None)


def _trained_again(incident: Incident, following: Attempt | None) -> datetime | None:
    """Return when ranks trained again."""
    if incident.incarnation is not None:
        began = _starts(incident.attempt)
        return min((at for at, n in began if n > incident.incarnation and at > incident.at), default=None)
    return min((at for at, _ in _starts(following)), default=None) if following else None


def _resumed_checkpoint(incident: Incident, following: Attempt | None) -> Checkpoint | None:
    """Return the checkpoint that training resumed from; if none is known yet, the newest possible one."""
    attempt = incident.attempt
    if following is not None and (following.resume_from or following.origin == Attempt.Origin.RESTARTED):
        return following.resume_from
    saved = Checkpoint.objects.filter(attempt=attempt).exclude(state=Checkpoint.State.CORRUPT)
    if incident.incarnation is not None:
        saved = saved.filter(created_at__lte=incident.at)
    return saved.order_by("-created_at").first() or attempt.resume_from


def _last_step(attempt: Attempt, incarnation: int | None) -> datetime | None:
    """Return when rank 0 last reported a step, in this incarnation or the newest."""
    owners = [owner_of(attempt.pk)]
    for name in SERIES:
        ids = read.ids_of(owners, name)
        reading = read.SeriesReading(owners, name, ids)
        sources_of_end = [source for source in reading.load() if incarnation in (None, source[1])]
        if not sources_of_end:
            continue
        newest = reading.curve(2, only=reading.sources.index(sources_of_end[-1])).last_step
        exact = read.SeriesReading(owners, name, ids, start=newest)
        sources = exact.load()
        if newest is not None and sources_of_end[-1] in sources:
            last = exact.curve(None, only=sources.index(sources_of_end[-1]))
            return datetime.fromtimestamp(float(last.time[-1]), UTC) if len(last.time) else None
    return None


def _is_over(incident: Incident, following: Attempt | None, again: datetime | None) -> bool:
    if incident.incarnation is not None:
        return again is not None or incident.attempt.ended_at is not None
    if following is None:
        return incident.attempt.closed_at is not None and incident.attempt.decided_at is not None
    return again is not None or following.ended_at is not None


def _nodes(attempt: Attempt) -> int:
    return max(1, len(attempt.nodes))


def _seconds(since: datetime | None, until: datetime | None) -> float | None:
    return None if since is None or until is None else max(0.0, (until - since).total_seconds())
