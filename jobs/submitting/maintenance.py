"""Warn in the dry run of maintenance that a job's time limit reaches into."""

from __future__ import annotations

from datetime import datetime, timedelta

from jobs.spec import JobSpec
from nodes.models import MaintenanceWindow, Node, Partition
from vigil_core import formatting

MOST = 3


def warnings(spec: JobSpec, now: datetime) -> list[str]:
    """Return a sentence for each of the next windows, if the job may still run when it begins."""
    begins = max(now, spec.resources.begin_at) if spec.resources.begin_at else now
    ends = begins + timedelta(seconds=spec.resources.time_limit_seconds)
    windows = MaintenanceWindow.objects.standing().filter(starts_at__lt=ends, ends_at__gt=begins).order_by("starts_at")
    usable = _usable(spec)
    return [_sentence(window, usable) for window in windows if usable & set(window.nodes)][:MOST]


def _usable(spec: JobSpec) -> set[str]:
    """Return the nodes that the job might get: those of its partition, else all."""
    partition = Partition.objects.reported().filter(name=spec.resources.partition).first()
    if partition is not None:
        return set(partition.nodes)
    return set(Node.objects.reported().values_list("name", flat=True))


def _sentence(window: MaintenanceWindow, usable: set[str]) -> str:
    hit = usable & set(window.nodes)
    where = "all its nodes" if hit == usable else formatting.plural(len(hit), "of its nodes", "of its nodes")
    when = f"from {formatting.clock(window.starts_at)} until {formatting.clock(window.ends_at)}"
    if window.wants_reservation or window.reservation:
        follows = "It starts there only if its time limit ends before, or afterwards."
    else:
        follows = "No job starts there meanwhile; one that runs continues, and delays the work."
    return f"{window.reason.rstrip('.')} on {where} {when}. {follows}"
