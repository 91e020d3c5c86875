"""Restarts in place: an incarnation that ended badly and began again within its attempt is an incident of its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from django.db import transaction
from django.utils import timezone

from jobs import tasks
from jobs.models import Attempt, Incident
from jobs.queueing import queue
from portal import untrusted

ENDED = "incarnation.ended"
MOST = 50  # incidents of one attempt: what a job says of itself must cost others nothing
NOT_BAD = frozenset({"joined", "stopped"})  # it made room for more nodes, or was asked to stop


def note_event(attempt: Attempt, event: Mapping[str, Any]) -> Incident | None:
    """Open the incident that a launcher's event tells of, due at once. In the intake's transaction, so once."""
    number = untrusted.count(event.get("incarnation"), untrusted.COLUMN)
    if event.get("kind") != ENDED or event.get("restarting") is not True or number is None:
        return None
    if event.get("why") in NOT_BAD or attempt.job.is_attached:
        return None
    in_place = Incident.objects.filter(attempt=attempt).exclude(incarnation=None)
    if in_place.count() >= MOST:
        return None
    now = timezone.now()
    at = untrusted.moment(event.get("time")) or now
    at = min(now, max(at, attempt.created_at))  # the job's own clock
    incident, is_new = Incident.objects.get_or_create(
        attempt=attempt, incarnation=number, defaults={"project_id": attempt.job.project_id, "at": at, "due_at": now}
    )
    if not is_new:
        return None
    transaction.on_commit(lambda: queue(tasks.diagnose, incident.pk))
    return incident
