"""Report the heartbeat of a web process, run the checks every ten seconds and notify sysadmins, in a thread."""

from __future__ import annotations

import logging
import threading
import time

from django.db import DatabaseError, close_old_connections, connections

from console.health import heartbeats, run
from console.health.notifier import Notifier

logger = logging.getLogger(__name__)

EVERY_S = heartbeats.INTERVAL_S
GRACE_S = 60.0  # after a start, while the other processes are starting as well


class Watcher(threading.Thread):
    """Reports for its process as long as the event loop beats."""

    def __init__(self) -> None:
        super().__init__(name="health", daemon=True)
        self.stopped = threading.Event()
        self.notifier = Notifier()
        self.began = self._beat_at = time.monotonic()

    def beat(self) -> None:
        """Note that the event loop runs; it calls this once a second."""
        self._beat_at = time.monotonic()

    def stop(self) -> None:
        """End the thread, as its process ends on request."""
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
                self.notifier.update(report)
        except DatabaseError as error:
            logger.warning("the portal's health cannot be stored: %s", error)
            connections.close_all()
        except Exception:  # without this thread nobody would be notified
            logger.exception("the portal's health cannot be checked")
