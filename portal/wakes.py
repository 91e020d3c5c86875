"""Run a periodic task at once instead of at its next time, because something has just happened.

However many requests come, one wake of a task is on its way at a time, and no two begin within `spacing_s`. A wake that
begins makes room for the next one before it reads anything, so what happens after that is seen by another. Redis
stores these marks, which expire by themselves: without Redis, or with a lost message, the periodic task goes on.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass

import redis

from portal.publish import connection
from portal.queueing import send

logger = logging.getLogger(__name__)

LOST_S = 5  # a wake that has not begun by then counts as lost
RETRY_S = 2.0
"""Seconds without contacting Redis after a failure: while it hangs, only one request waits for it."""
_retry_at = 0.0


@dataclass(frozen=True)
class Wake:
    """The name of the task that a wake runs, and how far apart its runs begin."""

    task: str
    spacing_s: float

    @property
    def pending_key(self) -> str:
        return f"vigil:wake:{self.task}"

    @property
    def _begun_key(self) -> str:
        return f"{self.pending_key}:begun"

    def request(self) -> bool:
        """Have a worker run the task at once. Return whether it will, be it by an earlier request."""
        global _retry_at
        if time.monotonic() < _retry_at:
            return False
        try:
            with connection().pipeline(transaction=False) as pipe:
                pipe.set(self.pending_key, 1, nx=True, ex=LOST_S)
                pipe.exists(self._begun_key)
                is_first, is_soon = pipe.execute()
        except (redis.RedisError, OSError) as error:
            _retry_at = time.monotonic() + RETRY_S
            logger.warning("%s could not be woken; it runs at its next scheduled time: %s", self.task, error)
            return False
        if is_first:
            self.send(countdown=self.spacing_s if is_soon else None)
        return True

    def begin(self) -> None:
        """Note that the task reads what is due from now on: later changes need another wake."""
        mark(self._begun_key, self.spacing_s)
        try:
            connection().delete(self.pending_key)
        except (redis.RedisError, OSError):
            logger.warning("Redis does not respond: the next wake may be %s s late", LOST_S)

    def send(self, *args: int, countdown: float | None = None) -> None:
        send(self.task, args, expires_s=LOST_S, countdown=countdown)


FOLLOWER = Wake("jobs.tasks.wake", spacing_s=0.25)
"""Polls the scheduler and carries out orders."""
HEALTH = Wake("nodes.tasks.judge", spacing_s=1.0)
"""Judges what nodes have just reported."""


def mark(name: str, seconds: float) -> bool:
    """Set a mark that expires by itself. Return whether it was not set before."""
    try:
        return bool(connection().set(name, 1, nx=True, px=int(seconds * 1000)))
    except (redis.RedisError, OSError):
        return False
