"""Where GPUs meet jobs: which a job holds and held, by the scheduler's id and the time, and what its launchers say."""

from __future__ import annotations

from collections.abc import Iterable

from jobs.models import Attempt, Event
from nodes.models import Holding, QueuedJob
from nodes.telemetry import holdings
from portal import untrusted

TOLD = "gpus"  # the launcher's event


def hold() -> None:
    """Bring in step who holds which GPU: by scheduler and processes, then as launchers know better."""
    holdings.update()
    there = Holding.objects.filter(until=None).exclude(source=Holding.Source.PROCESSES)
    running = Attempt.objects.alive().filter(scheduler_id__in=there.values("scheduler_id"))
    queued = {
        job.scheduler_id: job for job in QueuedJob.objects.filter(scheduler_id__in=running.values("scheduler_id"))
    }
    if not queued:
        return
    told = Event.objects.filter(attempt__in=running, kind=TOLD).select_related("attempt").order_by("time")
    for event in told.only("data", "time", "attempt__scheduler_id"):
        if job := queued.get(event.attempt.scheduler_id):
            holdings.told_by_launcher(job, _uuids(event.data), event.time)


def _uuids(data: dict[str, object]) -> list[str]:
    gpus = data.get("gpus")
    found = [one.get("uuid") for one in gpus if isinstance(one, dict)] if isinstance(gpus, list) else []
    return [uuid for one in found if (uuid := untrusted.name(one, 96))]


def held_by(attempts: Iterable[Attempt]) -> dict[int, list[Holding]]:
    """What each attempt held. The scheduler may use a number again, so its time counts, too."""
    rows = {attempt.pk: attempt for attempt in attempts if attempt.scheduler_id and attempt.started_at}
    by_id: dict[str, list[Attempt]] = {}
    for attempt in rows.values():
        by_id.setdefault(attempt.scheduler_id, []).append(attempt)
    found: dict[int, list[Holding]] = {pk: [] for pk in rows}
    held = (
        Holding.objects.filter(scheduler_id__in=by_id)
        .select_related("gpu", "agent")
        .order_by("agent__node", "gpu__index")
    )
    for holding in held:
        for attempt in by_id[holding.scheduler_id]:
            if _is_of(holding, attempt):
                found[attempt.pk].append(holding)
    return found


def _is_of(holding: Holding, attempt: Attempt) -> bool:
    began, ended = attempt.started_at, attempt.ended_at
    if began is None or (ended is not None and holding.since >= ended):
        return False
    return holding.until is None or holding.until > began
