"""Open the site's scheduler, and store its cluster in rows, which pages and checks read instead of the scheduler."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from functools import lru_cache, partial
from typing import Any

from django.conf import settings
from django.utils import timezone

from nodes.cluster import rows
from nodes.cluster.rows import Difference
from nodes.models import Reading
from nodes.schedulers.base import Capabilities, Listing, NodeStatus, Scheduler, SchedulerError
from nodes.schedulers.choose import SchedulerSettings, capabilities_of, open_scheduler
from nodes.schedulers.clock import offset_s
from portal.models import User

logger = logging.getLogger(__name__)
Part = Reading.Part
EVERY = {
    Part.NODES: timedelta(seconds=5),
    Part.QUEUE: timedelta(seconds=15),
    Part.PARTITIONS: timedelta(seconds=60),
    Part.RESERVATIONS: timedelta(seconds=60),
    Part.ACCOUNTS: timedelta(seconds=60),
    Part.LICENSES: timedelta(seconds=15),  # their use changes with the queue
    Part.CLOCK: timedelta(minutes=5),
}
RETRY_AFTER = timedelta(seconds=15)  # minimum time before a failed part is read again
BUDGET_S = 2.0  # per tick: parts that have not begun by then wait for the next tick
MAX_PARTS = 2  # per tick, but for a site's first one: these calls come on top of the poll's


def scheduler() -> Scheduler:
    """Return the scheduler that the settings name."""
    return _open(
        SchedulerSettings(
            name=settings.VIGIL_SCHEDULER,
            home=settings.VIGIL_HOME,
            local_user=settings.VIGIL_LOCAL_USER,
            local_cpus=settings.VIGIL_LOCAL_CPUS,
            local_gpus=settings.VIGIL_LOCAL_GPUS,
            local_environment=settings.VIGIL_LOCAL_ENVIRONMENT,
            slurm_url=settings.VIGIL_SLURM_URL,
            slurm_key_file=settings.VIGIL_SLURM_KEY_FILE,
            slurm_token_command=settings.VIGIL_SLURM_TOKEN_COMMAND,
            slurm_user=service_user(),
            slurm_ca_file=settings.VIGIL_SLURM_CA_FILE,
        )
    )


def capabilities() -> Capabilities:
    """Return what the scheduler in the settings can do, without opening it."""
    return capabilities_of(settings.VIGIL_SCHEDULER)


def service_user() -> str:
    """Return the Slurm user whose token polls and drains: VIGIL_SLURM_USER, else the first sysadmin's."""
    if not capabilities().is_remote or settings.VIGIL_SLURM_USER:
        return str(settings.VIGIL_SLURM_USER)
    sysadmins = User.objects.filter(is_superuser=True, is_active=True).exclude(slurm_user=None).order_by("pk")
    return sysadmins.values_list("slurm_user", flat=True).first() or ""


_open = lru_cache(maxsize=4)(open_scheduler)


def unix_user(submitted_as: str) -> str:
    """Return the Unix user that a job of this submitter runs as; "" is the portal's own user."""
    return submitted_as if capabilities().runs_as_owner else str(settings.VIGIL_LOCAL_USER)


def is_due() -> bool:
    """Return whether a part is old enough to be read again."""
    return bool(_due(timezone.now(), Reading.objects.in_bulk()))


def sync(source: Scheduler) -> bool:
    """Read the parts that are due, the longest waiting first, within a tick's budget; return whether any was."""
    until = time.monotonic() + BUDGET_S
    readings = Reading.objects.in_bulk()
    due = _due(timezone.now(), readings)
    for part in due[: MAX_PARTS if readings else None]:
        if time.monotonic() > until:
            break
        read(source, part)
    return bool(due)


def read(source: Scheduler, *parts: Part) -> None:
    """Read these parts (default: all) into rows; rows that the scheduler no longer lists are deleted.

    If it does not respond, the rows stay as they are and the reading records why.
    """
    for part in parts or tuple(EVERY):
        try:
            found = _READERS[part](source)
        except SchedulerError as error:
            _note_failure(part, str(error))
        else:
            rows.write(*found.differences, also=partial(_note_success, part, found))


def note_outage(error: SchedulerError) -> None:
    """Record a failure for the parts that are due: the scheduler has just failed to respond to another request."""
    for part in _due(timezone.now(), Reading.objects.in_bulk()):
        _note_failure(part, str(error))


def hurry(part: Part) -> None:
    """Make a part due for the next tick, because an action has changed it."""
    Reading.objects.filter(part=part).update(asked_at=None)


def readings() -> dict[str, Reading]:
    """Return the readings by part, including parts that have never been read."""
    stored = Reading.objects.in_bulk()
    return {part.value: stored.get(part.value) or Reading(part=part.value) for part in Part}


def last_read_at(part: Part) -> datetime | None:
    """Return when this part was last read from the scheduler; None if it never was."""
    return Reading.objects.filter(part=part).values_list("read_at", flat=True).first()


def nodes_read_since(moment: datetime | None) -> bool:
    """Return whether the nodes were read from the scheduler after this moment; with None, whether they ever were."""
    read_at = last_read_at(Reading.Part.NODES)
    return read_at is not None and (moment is None or read_at > moment)


def _due(now: datetime, stored: Mapping[str, Reading]) -> list[Part]:
    since: dict[Part, datetime] = {}
    for part, every in EVERY.items():
        reading = stored.get(part.value)
        if reading is None or reading.asked_at is None:
            since[part] = now - timedelta(days=1)
            continue
        due = reading.asked_at + (max(every, RETRY_AFTER) if reading.error else every)
        if due <= now or reading.asked_at > now:  # the clock was set back
            since[part] = due
    return sorted(since, key=lambda part: since[part])


def _note_success(part: Part, found: PartRead) -> None:
    now, unreadable = timezone.now(), found.unreadable
    values = {
        "asked_at": now, "read_at": now, "error": "", "failing_since": None, "unreadable": unreadable,
        "clock_offset_s": found.clock_offset_s,
    }  # fmt: skip
    if unreadable and Reading.objects.filter(part=part).exclude(unreadable=unreadable).exists():
        logger.warning("%s: %d of the scheduler's records could not be read and are left out", part.label, unreadable)
    if not Reading.objects.filter(part=part).update(**values):
        Reading.objects.update_or_create(part=part, defaults=values)


def _note_failure(part: Part, error: str) -> None:
    now = timezone.now()
    Reading.objects.update_or_create(part=part, defaults={"asked_at": now, "error": error})
    if Reading.objects.filter(part=part, failing_since=None).update(failing_since=now):
        logger.warning("the scheduler does not report %s: %s", part.label, error)


@dataclass(frozen=True)
class PartRead:
    """The scheduler's response about one part. `unreadable` counts records that could not be parsed or stored."""

    differences: tuple[Difference, ...]
    unreadable: int
    clock_offset_s: float | None = None

    @classmethod
    def of(cls, unreadable: int, *differences: Difference) -> PartRead:
        return cls(differences, unreadable + sum(difference.unreadable for difference in differences))


def _nodes(source: Scheduler) -> PartRead:
    nodes = source.nodes()
    found = rows.differences(rows.NODES, map(_with_rounded_load, nodes), unparsed=nodes.unreadable)
    return PartRead.of(nodes.unreadable, found)


def _with_rounded_load(node: NodeStatus) -> NodeStatus:
    """Round the node's load, which would otherwise change slightly at every reading."""
    return node if node.load is None else replace(node, load=round(node.load, 1))


def _accounts(source: Scheduler) -> PartRead:
    accounts = source.accounts()
    qos = rows.differences(rows.QOS, accounts.qos)
    return PartRead.of(accounts.unreadable, qos, rows.differences(rows.ASSOCIATIONS, accounts.associations))


def _clock(source: Scheduler) -> PartRead:
    return PartRead((), 0, offset_s(source.clock))


def _listing(kind: rows.RowKind, found: Listing[Any]) -> PartRead:
    return PartRead.of(found.unreadable, rows.differences(kind, found))


_READERS: dict[Part, Callable[[Scheduler], PartRead]] = {
    Part.NODES: _nodes,
    Part.QUEUE: lambda source: _listing(rows.QUEUE, source.queue()),
    Part.PARTITIONS: lambda source: _listing(rows.PARTITIONS, source.partitions()),
    Part.RESERVATIONS: lambda source: _listing(rows.RESERVATIONS, source.reservations()),
    Part.ACCOUNTS: _accounts,
    Part.LICENSES: lambda source: _listing(rows.LICENSES, source.licenses()),
    Part.CLOCK: _clock,
}
