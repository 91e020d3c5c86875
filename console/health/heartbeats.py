"""Report in the database every ten seconds that this process is working; read which processes have reported."""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from django.db import DatabaseError, connections
from django.db.models.functions import Now

from portal.models import Heartbeat

logger = logging.getLogger(__name__)

INTERVAL_S = 10.0
# Three reports were missed: it hangs, or the database was locked for that long.
SILENT_S = 30.0
# A process that was killed and will not come back (a container that was replaced) is forgotten after this.
FORGOTTEN = timedelta(minutes=10)
HOST = socket.gethostname()[:64]


@dataclass(frozen=True)
class Activity:
    """State of a process: whether it makes progress, its task and the seconds spent in it."""

    is_alive: bool = True
    task: str = ""
    task_seconds: float = 0.0


class HeartbeatReporter(threading.Thread):
    """Reports for a process as long as the process makes progress."""

    def __init__(self, role: str, activity: Callable[[], Activity], is_ticked: Callable[[], bool]) -> None:
        super().__init__(name="heartbeat", daemon=True)
        self.role, self.activity, self.is_ticked = role, activity, is_ticked
        self.stopped = threading.Event()

    def run(self) -> None:
        while not self.stopped.is_set():
            self.once()
            self.stopped.wait(INTERVAL_S)

    def once(self) -> None:
        try:
            if (activity := self.activity()).is_alive:
                report(self.role, activity)
            if self.is_ticked():
                report("beat", Activity(), host="", pid=0)
        except DatabaseError as error:  # locked or away: the next report is due in ten seconds
            logger.warning("no heartbeat: %s", error)
            connections.close_all()  # this thread's


def report(role: str, activity: Activity, *, host: str = HOST, pid: int | None = None) -> None:
    """Store that a process is working. Beat opens no database, so the worker that takes its ticks reports for it."""
    pid = os.getpid() if pid is None else pid
    changes = {
        "at": Now(),
        "clock_offset_s": time.time() - database_time(),
        "task": activity.task[:100],
        "task_seconds": activity.task_seconds,
    }
    row = Heartbeat.objects.filter(role=role, host=host, pid=pid)
    if not row.update(**changes):
        _remove_ended(role, host)
        Heartbeat.objects.bulk_create([Heartbeat(role=role, host=host, pid=pid, **changes)], ignore_conflicts=True)


def remove(role: str) -> None:
    """Remove this process's row when it ends on request, so that it is not reported as silent."""
    with suppress(DatabaseError):
        Heartbeat.objects.filter(role=role, host=HOST, pid=os.getpid()).delete()


def _remove_ended(role: str, host: str) -> None:
    """Remove the rows of this process's predecessors on this machine, and all rows older than FORGOTTEN."""
    Heartbeat.objects.filter(at__lt=Now() - FORGOTTEN).delete()
    ended = [row.pk for row in Heartbeat.objects.filter(role=role, host=host) if not _exists(row.pid)]
    Heartbeat.objects.filter(pk__in=ended).delete()


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def database_time() -> float:
    """Return the database's clock in Unix seconds; SQLite uses this machine's."""
    connection = connections["default"]
    if connection.vendor == "sqlite":
        return time.time()
    with connection.cursor() as cursor:
        cursor.execute("SELECT extract(epoch FROM clock_timestamp())")
        return float(cursor.fetchone()[0])


@dataclass(frozen=True)
class Process:
    """A process as its last report describes it."""

    role: str
    host: str
    pid: int
    silent_s: float
    clock_offset_s: float
    task: str
    task_seconds: float

    @property
    def is_silent(self) -> bool:
        return self.silent_s > SILENT_S


def processes() -> list[Process]:
    """Return every process that has reported within ten minutes."""
    now = datetime.fromtimestamp(database_time(), UTC)
    return [
        Process(
            row.role, row.host, row.pid, abs((now - row.at).total_seconds()), row.clock_offset_s, row.task,
            row.task_seconds,
        )
        for row in Heartbeat.objects.order_by("role", "host", "pid")
        if abs(now - row.at) < FORGOTTEN
    ]  # fmt: skip
