"""Queue a task of jobs by its name, so that modules below `jobs.tasks` need not import it.

A queued task only makes work happen sooner: work that is due is stored in the database, and the next tick finds it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import Literal

from celery import current_app
from kombu.exceptions import OperationalError

logger = logging.getLogger(__name__)

TaskName = Literal[
    "jobs.tasks.submit",
    "jobs.tasks.follow",
    "jobs.tasks.wake",
    "jobs.tasks.diagnose",
    "jobs.tasks.replay",
    "jobs.tasks.empty_trash",
]
EXPIRES_S: Mapping[TaskName, float] = {
    "jobs.tasks.submit": 60,
    "jobs.tasks.follow": 2,
    "jobs.tasks.wake": 5,
    "jobs.tasks.diagnose": 60,
    "jobs.tasks.replay": 60,
    "jobs.tasks.empty_trash": 600,
}
"""A worker drops a message older than this: by then a tick has done the work."""

RETRY_S = 2.0
"""Seconds without contacting the broker after a failure: while Redis hangs, only one request waits for it."""
_retry_at = 0.0


def queue(name: TaskName, *args: int, countdown: float | None = None) -> None:
    """Have a worker run the task soon, or after `countdown` seconds.

    Never raises for a broker that is down: the next tick does the work anyway, so no caller waits or fails for it.
    """
    global _retry_at
    if time.monotonic() < _retry_at:
        return
    expires = EXPIRES_S[name]
    try:
        current_app.send_task(name, args, countdown=countdown, expires=expires, retry=False, ignore_result=True)
    except (OperationalError, OSError) as error:
        _retry_at = time.monotonic() + RETRY_S
        logger.warning("Not queued, the next tick finds it: %s%s (%s)", name, args, error)
