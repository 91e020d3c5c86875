"""Check that clocks agree: this machine's with the database, Redis, Vigil's other machines, Slurm and the nodes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import timedelta

from django.conf import settings
from django.utils import timezone
from redis.exceptions import RedisError

from console.health import heartbeats
from console.health.finding import Finding
from nodes.models import Agent, Reading
from nodes.telemetry.intake import CLOCK_S as AGENT_CLOCK_S
from portal.publish import connection
from vigil_core import formatting

# Sign-in links, tokens for Slurm (they live a minute) and the order of events are still right below this.
APART_S = 5.0
REMEDY = "Let NTP (chrony, systemd-timesyncd) set the clocks of both machines."
MAX_NAMED = 3
SCHEDULER_FRESH = timedelta(minutes=15)  # it is read every five


def check() -> Iterator[Finding]:
    offsets = {"the database": _offset_of_database(), "Redis": _offset_of_redis()}
    for name, offset in offsets.items():
        if abs(offset) > APART_S:
            yield _apart(f"clock.{name.split()[-1].lower()}", f"The clocks of this machine and of {name}", offset)
    database_offset = offsets["the database"]
    for process in heartbeats.processes():
        if not process.is_silent and process.pid and abs(process.clock_offset_s - database_offset) > APART_S:
            title = f"The clocks of two of Vigil's machines ({process.role})"
            yield _apart(f"clock.process.{process.role}", title, process.clock_offset_s - database_offset, process.host)
    yield from _scheduler()
    yield from _nodes()


def _offset_of_database() -> float:
    return time.time() - heartbeats.database_time()


def _offset_of_redis() -> float:
    """Return 0 for a Redis on this machine, and for one that does not answer: another check reports that."""
    if settings.REDIS_URL.startswith("unix:"):
        return 0.0
    try:
        seconds, microseconds = connection().time()
    except (RedisError, OSError):
        return 0.0
    return time.time() - (seconds + microseconds / 1e6)


def _scheduler() -> Iterator[Finding]:
    """Compare with slurmctld by what the follow worker has measured; if Slurm is silent, pages report that."""
    since = timezone.now() - SCHEDULER_FRESH
    read = Reading.objects.filter(part=Reading.Part.CLOCK, read_at__gte=since)
    offset = read.values_list("clock_offset_s", flat=True).first() or 0.0
    if abs(offset) > APART_S:
        yield _apart("clock.slurm", "The clocks of Vigil's follow worker and of slurmctld", offset)


def _nodes() -> Iterator[Finding]:
    reporting = Agent.objects.filter(is_made_up=False, heard_at__gte=timezone.now() - timedelta(minutes=5))
    rows = reporting.exclude(clock_offset_s=None).values_list("node", "clock_offset_s")
    offsets = {node: offset or 0.0 for node, offset in rows}
    wrong = sorted(node for node, offset in offsets.items() if abs(offset) > AGENT_CLOCK_S)
    if not wrong:
        return
    if len(wrong) > 1 and len(wrong) == len(offsets):
        title = "The portal's clock differs from every node's by more than a minute."
    else:
        title = f"The clock of {formatting.plural(len(wrong), 'node')} differs from the portal's by more than a minute."
    named = ", ".join(f"{node} ({offsets[node]:+,.0f} s)" for node in wrong[:MAX_NAMED])
    more = f" and {len(wrong) - MAX_NAMED} more" if len(wrong) > MAX_NAMED else ""
    yield Finding("clock", "clock.nodes", "warning", title, f"{named}{more}.", REMEDY)


def _apart(code: str, which: str, offset: float, where: str = "") -> Finding:
    detail = f"On {where}." if where else ""
    return Finding("clock", code, "warning", f"{which} are {formatting.duration(abs(offset))} apart.", detail, REMEDY)
