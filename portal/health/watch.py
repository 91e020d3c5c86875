"""The thread of a web process that reports its heartbeat, runs the checks every ten seconds and notifies sysadmins."""

from __future__ import annotations

import logging
import threading
import time

from django.db import DatabaseError, close_old_connections, connections

from portal.health import heartbeats, run
from portal.health.telling import Notifier

logger = logging.getLogger(__name__)

EVERY_S = heartbeats.INTERVAL_S
GRACE_S = 60.0  # after a start: the other processes are starting, too


class Watcher(threading.Thread):
    """Reports for its process as long as the event loop beats."""

    def __init__(self) -> None:
        super().__init__(name="health", daemon=True)
        self.stopped = threading.Event()
        self.notifier = Notifier()
        self.began = self._beat_at = time.monotonic()

    def beat(self) -> None:
        """Called by the event loop, once a second."""
        self._beat_at = time.monotonic()

    def stop(self) -> None:
        """The process ends as it was asked to."""
        self.stopped.set()

    def run(self) -> None:
        while not self.stopped.wait(EVERY_S if self.began != self._beat_at else 1.0):
            self.once()
        heartbeats.remove("web")
        connections.close_all()

    def once(self) -> None:
        try:
            close_old_connections()
            if time.monotonic() - self._beat_at < EVERY_S:
                heartbeats.report("web", heartbeats.Activity())
            report = run.current(0.0)
            if time.monotonic() - self.began > GRACE_S:
                self.notifier.take(report)
        except DatabaseError as error:
            logger.warning("the portal's health cannot be stored: %s", error)
            connections.close_all()
        except Exception:  # without this thread nobody would be told of anything
            logger.exception("the portal's health cannot be checked")
