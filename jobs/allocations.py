"""Relate GPUs to jobs: which GPUs a job has or had, by scheduler id and time, and what its launchers report."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime

from django.db.models import Exists, Max, OuterRef, Q
from django.db.models.lookups import IsNull

from jobs.models import Attempt, Event
from jobs.models.attempt import AttemptQuerySet
from nodes.models import Holding
from nodes.telemetry import allocations
from nodes.telemetry.claims import MAX_REPORTED_GPUS, LauncherReport
from portal.bulk import chunks
from vigil_core import untrusted

GPUS_EVENT = "gpus"  # the launcher's event
_EventKey = tuple[int, datetime]  # the number of an event, and its time
_gpus_by_event: dict[_EventKey, list[str]] = {}
"""Cache of values read from events, which never change."""


def update() -> None:
    """Update which job each GPU is allocated to."""
    allocations.update(_claims())


def _claims() -> Iterator[LauncherReport]:
    """Yield the last report of each launcher of running jobs, in order of arrival."""
    events = Event.objects.filter(kind=GPUS_EVENT, rank__lt=0, attempt__ended_at=None).exclude(attempt__scheduler_id="")
    last = events.values("attempt", "attempt__scheduler_id", "rank").annotate(last=Max("pk"), at=Max("time"))
    job_by_event = {
        (pk, at): job for pk, at, job in last.order_by("last").values_list("last", "at", "attempt__scheduler_id")
    }
    for gone in _gpus_by_event.keys() - job_by_event.keys():
        del _gpus_by_event[gone]
    _read([key for key in job_by_event if key not in _gpus_by_event])
    for key, scheduler_id in job_by_event.items():
        if key in _gpus_by_event:
            yield LauncherReport(scheduler_id, _gpus_by_event[key])


def _read(keys: Sequence[_EventKey]) -> None:
    for chunk in chunks(keys):
        times = dict(chunk)
        rows = Event.objects.filter(pk__in=times).order_by().values_list("pk", "data")
        _gpus_by_event.update(((pk, times[pk]), _uuids(data)) for pk, data in rows)


def _uuids(data: dict[str, object]) -> list[str]:
    """Return the reported GPUs; for a slice (MIG) the GPU that it belongs to."""
    gpus = data.get("gpus")
    named = [gpu for gpu in gpus if isinstance(gpu, dict)] if isinstance(gpus, list) else []
    found = (untrusted.name(gpu.get("parent") or gpu.get("uuid"), 96) for gpu in named[:MAX_REPORTED_GPUS])
    return list(dict.fromkeys(uuid for uuid in found if uuid))


def allocated_to(attempts: Iterable[Attempt]) -> dict[int, list[Holding]]:
    """Return each attempt's GPU allocations. The scheduler may reuse an id, so the time is compared as well."""
    rows = {attempt.pk: attempt for attempt in attempts if attempt.scheduler_id and attempt.started_at}
    by_id: dict[str, list[Attempt]] = {}
    for attempt in rows.values():
        by_id.setdefault(attempt.scheduler_id, []).append(attempt)
    by_attempt: dict[int, list[Holding]] = {pk: [] for pk in rows}
    allocated = (
        Holding.objects.filter(scheduler_id__in=by_id)
        .select_related("gpu", "agent")
        .order_by("agent__node", "gpu__index")
    )
    for holding in allocated:
        for attempt in by_id[holding.scheduler_id]:
            if overlaps(holding, attempt):
                by_attempt[attempt.pk].append(holding)
    return by_attempt


def overlaps(holding: Holding, attempt: Attempt) -> bool:
    """Return whether an attempt with the allocation's id ran while it lasted."""
    began, ended = attempt.started_at, attempt.ended_at
    if began is None or (ended is not None and holding.since >= ended):
        return False
    return holding.until is None or holding.until > began


def overlaps_any(attempts: AttemptQuerySet) -> Exists:
    """Return a condition on allocations of these attempts: `overlaps` as a database query."""
    began = Q(started_at__lt=OuterRef("until")) | Q(IsNull(OuterRef("until"), True), started_at__isnull=False)
    ended = Q(ended_at=None) | Q(ended_at__gt=OuterRef("since"))
    same = attempts.exclude(scheduler_id="").filter(scheduler_id=OuterRef("scheduler_id"))
    return Exists(same.filter(began, ended))
