"""Send a message that makes a worker run a task soon.

A message only makes work happen sooner: work that is due is stored in the database, and the next tick finds it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from celery import current_app
from kombu.exceptions import OperationalError

logger = logging.getLogger(__name__)

RETRY_S = 2.0
"""Seconds without contacting the broker after a failure: while Redis hangs, only one request waits for it."""
_retry_at = 0.0


def send(name: str, args: Sequence[int] = (), *, expires_s: float, countdown: float | None = None) -> None:
    """Have a worker run the task soon, or after `countdown` seconds; it drops a message older than `expires_s`.

    Never raises for a broker that is down: the next tick does the work anyway, so no caller waits or fails for it.
    """
    global _retry_at
    if time.monotonic() < _retry_at:
        return
    try:
        current_app.send_task(
            name, tuple(args), countdown=countdown, expires=expires_s, retry=False, ignore_result=True
        )
    except (OperationalError, OSError) as error:
        _retry_at = time.monotonic() + RETRY_S
        logger.warning("Not queued; the next tick will pick it up: %s%s (%s)", name, tuple(args), error)
