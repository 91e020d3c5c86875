"""The scheduler that this site uses, and its nodes as rows: pages and checks read those and ask no scheduler."""

from __future__ import annotations

from dataclasses import asdict
from datetime import timedelta
from functools import lru_cache

from django.conf import settings
from django.db import transaction
from django.utils import timezone

from nodes.models import Node
from nodes.schedulers.base import Scheduler
from nodes.schedulers.choose import SchedulerSettings, open_scheduler

COLUMNS = frozenset({"state", "reason", "cpus", "cpus_used", "gpus", "gpus_used", "gpu_type", "memory_mib"})
FRESH = timedelta(seconds=5)


def scheduler() -> Scheduler:
    """The one that the settings name."""
    return _open(
        SchedulerSettings(
            name=settings.VIGIL_SCHEDULER,
            home=settings.VIGIL_HOME,
            local_user=settings.VIGIL_LOCAL_USER,
            local_cpus=settings.VIGIL_LOCAL_CPUS,
            local_gpus=settings.VIGIL_LOCAL_GPUS,
            local_environment=settings.VIGIL_LOCAL_ENVIRONMENT,
        )
    )


_open = lru_cache(maxsize=4)(open_scheduler)


def unix_user(submitted_as: str) -> str:
    """The Unix user that a job runs as which is submitted in this person's name; "": the portal's own."""
    return str(settings.VIGIL_LOCAL_USER) if settings.VIGIL_SCHEDULER == "local" else submitted_as


def is_due() -> bool:
    """Whether the rows are old enough to ask again."""
    return not Node.objects.filter(seen_at__gt=timezone.now() - FRESH).exists()


def sync(source: Scheduler) -> None:
    """Bring the rows in step with what the scheduler says; a node that it no longer names is gone."""
    told = {status.name: status for status in source.nodes()}
    with transaction.atomic():
        known = set(Node.objects.scheduled().values_list("name", flat=True))
        now = timezone.now()
        for name, status in told.items():
            facts = {key: value for key, value in asdict(status).items() if key in COLUMNS}
            partition = status.partitions[0] if status.partitions else ""
            Node.objects.update_or_create(name=name, defaults={**facts, "partition": partition, "seen_at": now})
        if gone := known - set(told):
            Node.objects.filter(name__in=gone).delete()
