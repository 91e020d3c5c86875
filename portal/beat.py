"""Provide beat's scheduler, apart from portal.ticks: workers read the schedule there without loading Celery's beat."""

from __future__ import annotations

import logging
import time
from typing import Any

from celery.beat import PersistentScheduler, SchedulingError
from kombu import Connection
from kombu.exceptions import OperationalError

logger = logging.getLogger(__name__)


class Scheduler(PersistentScheduler):
    """Celery's scheduler, but an outage of Redis logs one line at each end instead of a traceback per tick."""

    _away_since: float | None = None
    _unsent = 0

    def apply_entry(self, entry: Any, producer: Any = None) -> None:
        try:
            self.apply_async(entry, producer=producer, advance=False)
        except SchedulingError as error:
            if not isinstance(error.__context__, OperationalError | OSError):
                logger.exception("%s was not sent", entry.name)
                return
            self._unsent += 1
            self._note_away(error.__context__)
        else:
            self._note_back()

    def _ensure_connected(self) -> Connection:
        """Wait for Redis at the start, for as long as it takes."""
        return self.connection.ensure_connection(lambda error, _interval: self._note_away(error))

    def _note_away(self, error: BaseException) -> None:
        if self._away_since is None:
            self._away_since = time.monotonic()
            logger.warning("Redis does not answer (%s). No task is sent until it does.", error)

    def _note_back(self) -> None:
        if self._away_since is None:
            return
        seconds = time.monotonic() - self._away_since
        logger.warning("Redis answers again after %.0f s. Ticks not sent: %d.", seconds, self._unsent)
        self._away_since, self._unsent = None, 0
