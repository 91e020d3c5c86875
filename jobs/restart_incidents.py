"""Open an incident for each restart in place: an incarnation that ended badly and was restarted in its attempt."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime
from functools import partial
from typing import Any

from django.db import transaction
from django.utils import timezone

from jobs.models import Attempt, Incident
from jobs.queueing import queue
from vigil_core import untrusted

ENDED = "incarnation.ended"
MAX_INCIDENTS = 50  # per attempt: a job's own reports must not cost others anything
NOT_BAD = frozenset({"joined", "stopped"})  # it made room for more nodes, or was asked to stop


def note_events(attempt: Attempt, events: Iterable[Mapping[str, Any]]) -> None:
    """Open the incidents that a launcher's events report, due at once. In the intake's transaction, so once."""
    bad: dict[int, Mapping[str, Any]] = {}
    for event in events:
        if (number := _ended_badly(event)) is not None:
            bad.setdefault(number, event)
    if not bad or attempt.job.is_attached:
        return
    in_place = Incident.objects.filter(attempt=attempt).exclude(incarnation=None)
    there = set(in_place.values_list("incarnation", flat=True))
    now = timezone.now()
    new = [number for number in bad if number not in there][: max(0, MAX_INCIDENTS - len(there))]
    made = Incident.objects.bulk_create(
        [
            Incident(
                attempt=attempt, incarnation=number, project_id=attempt.job.project_id, due_at=now,
                at=_time_of(bad[number], attempt, now),
            )
            for number in new
        ]
    )  # fmt: skip
    for incident in made:
        transaction.on_commit(partial(queue, "jobs.tasks.diagnose", incident.pk))


def _ended_badly(event: Mapping[str, Any]) -> int | None:
    """Return the incarnation that ended badly and began again, if the event says so."""
    if event.get("kind") != ENDED or event.get("restarting") is not True or event.get("why") in NOT_BAD:
        return None
    return untrusted.count(event.get("incarnation"), untrusted.MAX_INTEGER)


def _time_of(event: Mapping[str, Any], attempt: Attempt, now: datetime) -> datetime:
    """Return when it happened by the job's own clock, limited to the time since the attempt was created."""
    return min(now, max(untrusted.moment(event.get("time")) or now, attempt.created_at))
